"""The file of results: an evaluation continues from it, and results under other settings are refused."""

from __future__ import annotations

from pathlib import Path

from bench.paper.results import ABLATION, TUNING, Cell, Result, ResultFile
from bench.paper.systems import Shape

SETTINGS = {"target": "a", "splits": [(1, 1)]}


def result(part: str = ABLATION, family: str = "nq", tokens: int = 12) -> Result:
    return Result(Cell(part, "base", family, "greedy", Shape(), "1"), tokens, 4, 0.5, 0.25)


def test_results_survive_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "new" / "results.jsonl"
    first = ResultFile.open(file, SETTINGS)
    first.add(result())
    first.add(result(TUNING))
    first.add(Result(Cell(ABLATION, "other", "nq", "greedy", None, "http://host"), 12, 0, 0.5, 0.0))
    first.add_step("target", 2, 1.5)
    again = ResultFile.open(file, SETTINGS)
    assert again.found == first.found and again.steps == {("target", 2): 1.5}
    assert [*again.select(ABLATION, system="base")] == [result()] and not [*again.select(ABLATION, family="mtbench")]
    assert again.servers == ["other"]


def test_totals_add_up(tmp_path: Path) -> None:
    results = ResultFile.open(tmp_path / "results.jsonl", SETTINGS)
    assert results.total(ABLATION) is None
    results.add(result())
    results.add(result(family="gsm8k", tokens=8))
    total = results.total(ABLATION, system="base")
    assert total is not None and (total.speed, total.tokens_per_round, total.busy) == (20.0, 2.5, 0.5)
