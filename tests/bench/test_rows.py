"""bench/rows.py measures every part on the demo models, at every requested ISA level and number of rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import rows
from bench.rows import FORWARD, LINES, Measurement
from swiftspec import _C

pytestmark = pytest.mark.skipif(not _C.levels(), reason="this CPU has no AVX2")


def test_a_run_on_the_demo_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rows, "LEAST_S", 0.0)
    best, chosen = _C.level(), sorted({_C.levels()[0], _C.levels()[-1]})
    flags = ["--rows", "5,1", "--levels", ",".join(chosen), "--context", "20", "--threads", "1", "--repeats", "2"]
    rows.main([*flags, "--json", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())
    assert [model["model"] for model in found["models"]] == ["target", "draft"] and _C.level() == best
    for model in found["models"]:
        cases = [(m["level"], m["rows"]) for m in model["measurements"]]
        assert sorted(cases) == [(level, count) for level in chosen for count in (1, 5)]
        for m in model["measurements"]:
            assert m["least_ms"].keys() == m["median_ms"].keys() == set(LINES)
            assert all(0 < m["least_ms"][part] <= m["median_ms"][part] + 1e-5 for part in LINES)
    printed = capsys.readouterr().out
    assert printed.count("sum / forward") == 2 * len(chosen) and "calls from Python per forward" in printed


def test_the_parts_compute_the_forward() -> None:
    """The logits of the single operators are those of the native decoder."""
    args = rows.arguments(["--rows", "7", "--context", "12", "--threads", "1"])
    for model in rows.load(args):
        batch = model.chain(7)
        logits, spent = model.run_parts(batch)
        assert torch.equal(logits, model.run_forward(batch)[0]) and spent.keys() == set(FORWARD)


def test_sums_are_sums_of_their_parts() -> None:
    found = Measurement("avx2", 1, [dict.fromkeys(LINES, seconds) for seconds in (0.002, 0.001)])
    assert found.least("projections") == pytest.approx(4.0) and found.median("sum") == pytest.approx(1.5 * len(FORWARD))
