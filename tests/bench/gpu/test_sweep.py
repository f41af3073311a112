"""The sweep of a width-expanded pair, on a CPU with the demo models."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bench.data.heldout import DEMO
from bench.gpu import sweep
from swiftspec.lab import sweep_runs
from swiftspec.lab.worker_pool import Pair
from swiftspec.profiles import store


def arguments(**changed: Any) -> Namespace:
    usual: dict[str, Any] = {
        "pair": "demo", "device": "cpu", "prompts": 1, "tokens": 4, "repeats": 1, "budget": 60.0,
        "json": Path("sweep.json"),
    }  # fmt: skip
    return Namespace(**usual | changed)


@pytest.mark.parametrize(("device", "ranks", "pairs"), [("cpu", 1, []), ("cuda", 1, [(1, 0)]), ("cuda", 2, [(1, 1)])])
def test_the_splits_are_those_of_the_machine(device: str, ranks: int, pairs: list[tuple[int, int]]) -> None:
    pair = Pair(DEMO / "target", DEMO / "draft", {})
    request = sweep.request_of(arguments(device=device), pair, ranks)
    assert request.pairs == pairs and ("async" in request.modes) == bool(pairs)
    assert [sampling.greedy for sampling in request.samplings] == [True, False]
    assert (request.draft_leaves, request.base_ops) == ((8, "unfused") if device == "cuda" else (4, "reference"))


@pytest.mark.slow
def test_it_writes_a_valid_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_runs, "BATCHES", (8,))
    monkeypatch.setattr(sweep_runs, "SERIAL_STEPS", (1,))
    monkeypatch.setattr(sweep_runs, "ROWS", (1,))
    file = tmp_path / "sweep.json"
    found = sweep.run(arguments(json=file), sweep.PrintedProgress())
    assert found is not None and store.load(file)["runs"] == found["runs"]
    assert {run["plan"]["mode"] for run in found["runs"] if run["speeds"]} == {"ar", "serial"}
    assert {run["ops"] for run in found["runs"]} == {"auto", "reference"} and found["stopped"] is None
