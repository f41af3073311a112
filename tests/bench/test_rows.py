"""bench/rows.py measures every part on the demo models, at every requested ISA level and number of rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench import rows
from bench.rows import FORWARD, LINES, Measurement, first_block
from swiftspec import _C
from swiftspec.backends.cpu import cpu as host
from tests.backends.test_cpu import BF16, int4, random

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


def test_the_first_block_of_a_projection() -> None:
    weight = host.pack(int4(48, 128, 32, 1, False), BF16, "cpu")
    x: Tensor = random(3, 128, seed=2, dtype=BF16)
    whole, block = (host.norm_linear(x, None, each) for each in (weight, first_block(weight)))
    assert torch.equal(block, whole[:, :16])


@pytest.mark.parametrize("flags", [["--levels", "mmx"], ["--rows", "0"], ["--repeats", "0"], ["--context", "0"]])
def test_invalid_flags_are_refused_by_name(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        rows.arguments(flags)
    assert error.value.code == 2 and "error: " in capsys.readouterr().err


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^bench.rows: "):
        rows.main(["--model", str(tmp_path / "absent")])
