"""The report of an evaluation, from results that the tests make up."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from bench.paper.evaluation import DEFAULTS_NAME, GREEDY_NAME, Evaluation, Request, best_depth
from bench.paper.report import write_report
from bench.paper.results import ABLATION, SPLITS, TREE, TUNING, Cell, Result, ResultFile
from bench.paper.systems import ALL, BASE, KERNELS, PAPER_SPLITS, PLAIN, SPLIT, SYSTEMS, Shape, System, split_name
from swiftspec.control.step_times import GREEDY
from swiftspec.lab.trials import BATCHES

FAMILIES = "mtbench", "humaneval", "gsm8k", "alpaca", "cnndm", "nq"
SPEEDS = {PLAIN: 90.0, BASE: 100.0, SPLIT: 140.0, KERNELS: 120.0, ALL: 160.0}
SETTINGS = {"machine": {"count": 2, "name": "CPU"}, "target": "t", "draft": "d", "max_tokens": 100}


def evaluation_of(folder: Path, speeds: dict[System, float], *, emulates: bool = True) -> Evaluation:
    """Returns an evaluation with results of every part: a second per run, and two tokens per round."""
    samplings = {GREEDY_NAME: GREEDY, DEFAULTS_NAME: replace(GREEDY, temperature=1.0)}
    prompts = {family: [[1, 2]] for family in FAMILIES}
    request = Request(prompts, samplings, 100, 1, emulates, [(1, 1)], 1, "reference", 60.0)
    results = ResultFile.open(folder / "results.jsonl", SETTINGS)

    def add(part: str, system: System, shape: Shape, split: str, speed: float, sampling: str = GREEDY_NAME) -> None:
        for family in FAMILIES:
            cell = Cell(part, system.name, family, sampling, shape, split)
            results.add(Result(cell, round(speed), round(speed / 2), 1.0, 0.5))

    for system, speed in speeds.items():
        split = "1+1" if system.asynchronous else "1"
        for d in (1, 2):
            add(TUNING, system, Shape(draft_steps=d), split, speed - 10 * d)
        for sampling in request.samplings:
            add(ABLATION, system, Shape(draft_steps=1), split, speed, sampling)
    for number, own_split in enumerate(PAPER_SPLITS):
        add(SPLITS, ALL, Shape(draft_steps=2), split_name(own_split), 100.0 + number)
    for size in BATCHES:
        add(TREE, KERNELS, Shape(size, 16, 7), "1", 100.0)
        add(TREE, KERNELS, Shape(32, size, 7), "1", 100.0)
    results.add_step("target", 1.25)
    return Evaluation(cast("Any", None), request, results, lambda _: None)


def test_the_report_has_every_figure(tmp_path: Path) -> None:
    files = [*write_report(evaluation_of(tmp_path, SPEEDS), tmp_path, "pair")]
    assert [file.name for file in files] == [
        "report.md", "numbers.csv", "figure2.svg", "figure7.svg", "figure8.svg", "figure9.svg",
    ]  # fmt: skip
    text = files[0].read_text(encoding="utf-8")
    assert all(
        f"## {title}" in text for title in ("Figure 2", "Figure 7", "Figure 8", "Figure 9", "Table 1", "Table 6")
    )
    assert "Order as in the paper: yes." in text and "| 1.60 | - |" in text and "| 1.40 | 1.38 |" in text
    rows = list(csv.DictReader(files[1].open(encoding="utf-8")))
    assert {row["kind"] for row in rows} == {"emulated", "measured", "quoted"}
    assert any(row["figure"] == "Figure 8" and row["kind"] == "quoted" and row["value"] == "1.375" for row in rows)
    assert all(file.read_text(encoding="utf-8").startswith("<?xml") for file in files[2:])


def test_the_depth_with_the_most_tokens_per_second_is_chosen(tmp_path: Path) -> None:
    made = evaluation_of(tmp_path, SPEEDS)
    assert best_depth(made.results, TUNING, ALL, (1, 1)) == (1, 150.0)
    assert best_depth(made.results, TUNING, ALL, (3, 1)) == (3, 0.0)
    assert [made.best_split(system) for system in SYSTEMS] == [(1, 0), (1, 0), (1, 1), (1, 0), (1, 1)]
