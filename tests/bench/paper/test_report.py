"""The report of an evaluation, from results that the tests make up."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from bench.paper.evaluation import DEFAULTS_NAME, GREEDY_NAME, Evaluation, Request, best_depth
from bench.paper.operators import TABLE_3, MeasuredOperators, flops, table_3_rows, table_7_rows
from bench.paper.report import Report, pairs_report, write_report
from bench.paper.results import ABLATION, EQUAL_DEPTH, SPLITS, TREE, TUNING, Cell, Result, ResultFile
from bench.paper.systems import ALL, BASE, KERNELS, PAPER_SPLITS, PLAIN, SPLIT, SYSTEMS, Shape, System, split_name
from swiftspec.control.step_times import GREEDY
from swiftspec.lab.sweep_runs import BATCHES

FAMILIES = "mtbench", "humaneval", "gsm8k", "alpaca", "cnndm", "nq"
SPEEDS = {PLAIN: 90.0, BASE: 100.0, SPLIT: 140.0, KERNELS: 120.0, ALL: 160.0}
SETTINGS = {"machine": {"count": 2, "name": "CPU"}, "target": "t", "draft": "d", "max_tokens": 100}


def evaluation_of(folder: Path, speeds: dict[System, float], *, emulates: bool = True) -> Evaluation:
    """Returns an evaluation with results of every part: a second per run, and two tokens per round."""
    request = Request(
        prompts={family: [[1, 2]] for family in FAMILIES},
        texts={family: ["a"] for family in FAMILIES},
        samplings={GREEDY_NAME: GREEDY, DEFAULTS_NAME: replace(GREEDY, temperature=1.0)},
        max_tokens=100,
        repeats=1,
        emulates=emulates,
        splits=[(1, 1)],
        tp=1,
        sizes={"target": [1], "draft": [1]},
        base_ops="reference",
        budget_s=60.0,
    )
    made = Evaluation(cast("Any", None), request, ResultFile.open(folder / "results.jsonl", SETTINGS), lambda _: None)

    for system, speed in speeds.items():
        split = "1+1" if system.asynchronous else "1"
        for d in (1, 2):
            add(made, Cell(TUNING, system.name, "", GREEDY_NAME, Shape(draft_steps=d), split), speed - 10 * d)
        for sampling in request.samplings:
            add(made, Cell(ABLATION, system.name, "", sampling, Shape(draft_steps=1), split), speed)
    for system, length in ((BASE, 2.0), (SPLIT, 1.5)):
        cell = Cell(EQUAL_DEPTH, system.name, "", GREEDY_NAME, Shape(draft_steps=1), "1")
        add(made, cell, 60.0, length)
    for number, own_split in enumerate(PAPER_SPLITS):
        cell = Cell(SPLITS, ALL.name, "", GREEDY_NAME, Shape(draft_steps=2), split_name(own_split))
        add(made, cell, 100.0 + number)
    for size in BATCHES:
        add(made, Cell(TREE, KERNELS.name, "", GREEDY_NAME, Shape(size, 16, 7), "1"), 100.0)
        add(made, Cell(TREE, KERNELS.name, "", GREEDY_NAME, Shape(32, size, 7), "1"), 100.0)
    made.results.add_step("target", 1, 1.25)
    return made


def add(evaluation: Evaluation, cell: Cell, speed: float, length: float = 2.0) -> None:
    """Adds a second of decoding in every family. `length`: tokens per round."""
    for family in FAMILIES:
        evaluation.results.add(Result(replace(cell, family=family), round(speed), round(speed / length), 1.0, 0.5))


def add_server(evaluation: Evaluation, name: str, speeds: dict[str, float]) -> None:
    """Adds a server. `speeds`: tokens per second by address."""
    for address, speed in speeds.items():
        add(evaluation, Cell(TUNING, name, "", GREEDY_NAME, None, address), speed)
        add(evaluation, Cell(ABLATION, name, "", GREEDY_NAME, None, address), speed)


def test_the_report_has_every_figure(tmp_path: Path) -> None:
    files = [*write_report(evaluation_of(tmp_path, SPEEDS), tmp_path, "pair")]
    assert [file.name for file in files] == [
        "report.md", "numbers.csv", "figure2.svg", "figure7.svg", "figure8.svg", "figure9.svg",
    ]  # fmt: skip
    text = files[0].read_text(encoding="utf-8")
    titles = [f"Figure {number}" for number in (2, 7, 8, 9)] + [f"Table {number}" for number in (1, 3, 6, 7)]
    assert all(f"## {title}" in text for title in titles)
    assert "Order as in the paper: yes." in text and "| 1.60 | - |" in text and "| 1.40 | 1.38 |" in text
    assert "25 % at d = 1" in text and "24 % less of it for a verification and 78 % less of it for" in text
    rows = list(csv.DictReader(files[1].open(encoding="utf-8")))
    assert {row["kind"] for row in rows} == {"emulated", "measured", "quoted"}
    assert any(row["figure"] == "Figure 8" and row["kind"] == "quoted" and row["value"] == "1.375" for row in rows)
    assert all(file.read_text(encoding="utf-8").startswith("<?xml") for file in files[2:])


def test_a_server_counts_with_its_fastest_configuration(tmp_path: Path) -> None:
    made = evaluation_of(tmp_path, SPEEDS, emulates=False)
    add_server(made, "other", {"http://slow": 50.0, "http://fast": 128.0})
    add_server(made, "third", {"http://third": 20.0})
    report = Report(made)
    assert report.baselines == {"base": 100.0, "other": 128.0, "third": 20.0}
    text = report.text("pair")
    assert "| task | plain | base | other | third | all | all to plain | all to base | all to other |" in text
    assert "| **all** | 90.0 | 100.0 | 128.0 | 20.0 | 160.0 | 1.78 | 1.60 | 1.25 |" in text
    assert "other at http://fast, third at http://third" in text


def test_the_mean_over_pairs_uses_the_best_baseline_of_each(tmp_path: Path) -> None:
    first, second = (evaluation_of(tmp_path / name, SPEEDS, emulates=False) for name in "ab")
    add_server(second, "other", {"http://fast": 128.0})
    text = pairs_report({"a": Report(first), "b": Report(second)})
    assert "| a | 90.0 | 100.0 | 160.0 | 1.78 | 1.60 | 1.60 | base |" in text
    assert "| b | 90.0 | 128.0 | 160.0 | 1.78 | 1.60 | 1.25 | other |" in text
    assert f"| **mean** | - | - | - | 1.78 | 1.60 | {(1.6 + 1.25) / 2:.2f} | - |" in text


def test_the_depth_with_the_most_tokens_per_second_is_chosen(tmp_path: Path) -> None:
    made = evaluation_of(tmp_path, SPEEDS)
    assert best_depth(made.results, TUNING, ALL, (1, 1)) == (1, 150.0)
    assert best_depth(made.results, TUNING, ALL, (3, 1)) == (3, 0.0)
    assert [made.best_split(system) for system in SYSTEMS] == [(1, 0), (1, 0), (1, 1), (1, 0), (1, 1)]


def operators_of(file: Path) -> MeasuredOperators | None:
    """Returns operators of 10 us that move 10 MB, and one with its all-reduce in 15 us."""
    rows = [
        {"model": "Llama-3-70B", "tp": 4, "op": op, "rows": 8, "competitor": system, "microseconds": us, "moved": 10**7}
        for op, system, us in (
            ("qkv", "swiftspec", 10.0), ("o", "swiftspec, summed", 15.0), ("o", "swiftspec", 10.0), ("o", "marlin", 1.0)
        )
    ]  # fmt: skip
    file.write_text(json.dumps({"machine": {"gpu": "G", "copy GB/s": 2000.0}, "results": rows}), encoding="utf-8")
    return MeasuredOperators.read(file)


def test_operators_beside_those_of_the_paper(tmp_path: Path) -> None:
    assert MeasuredOperators.read(tmp_path / "missing.json") is None
    ours = operators_of(tmp_path / "kernels.json")

    def record(system: str, op: str, unit: str, kind: str, value: float | None) -> str:
        return "-" if value is None else f"{value:g}"

    three = {row[0]: row[4:] for row in table_3_rows(ours, record)}
    assert three.keys() == TABLE_3.keys() and three["down"] == ["-"] * 4
    assert three["o"][0] == "10" and [float(cell) for cell in three["o"][2:]] == pytest.approx([29.8507, 50.0])
    seven = {row[0]: row for row in table_7_rows(ours, record)}
    assert seven["Llama-3-70B, TP 4, o"][1:] == ["11.72", "16.9", "15.5", "-", "-", "22.8", "15"]


@pytest.mark.parametrize("op", ["qkv", "o", "swiglu", "down"])
def test_the_papers_compute_shares_follow_from_its_times(op: str) -> None:
    took, share, _ = TABLE_3[op]
    assert share is not None
    assert 100 * flops(op) / (1e-6 * took) / 989e12 == pytest.approx(share, abs=0.06)
