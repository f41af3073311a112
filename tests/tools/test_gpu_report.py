"""What the GPU was measured to do, beside the targets: from recorded results, and the targets from constants."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import constants, kernels_cuda, targets
from bench.cases_cuda import Maker
from bench.rivals import Rivals
from bench.targets import ASSUMED, Constants
from tools import gpu_report

MAKE = Maker("cpu", Rivals())


def result(op: str, rows: int, competitor: str, us: float, model: str = "Llama-3-70B", tp: int = 4) -> dict[str, Any]:
    if op.startswith("attention of"):
        case = MAKE.particles(model, tp, rows)
    elif op.startswith("attention"):
        case = MAKE.attention(model, tp, int(op.split()[1]), rows)
    else:
        case = MAKE.linear(model, tp, op, rows)
    return asdict(kernels_cuda.measure(case, competitor, list, ASSUMED, lambda calls: us))


def kernels(*results: dict[str, Any]) -> dict[str, Any]:
    rivals = ["flashinfer: not importable"]
    return {"machine": {"copy GB/s": 4300.0}, "results": list(results), "rivals": rivals, "failed": []}


def verdicts(decodes: list[dict[str, Any]], found: dict[str, Any] | None) -> dict[str, str]:
    return {line.what: str(line).split()[-1] for line in gpu_report.lines(decodes, found, None)}


RATES = {"tok/s": 200.0, "tok/round": 3.0}
DECODED = {
    "pair": "Llama-3-70B,Llama-3.2-3B", "ops": ["cuda", "cuda"], "serial": RATES, "ar": RATES, "same text": 1.0,
    "step ms": {"Llama-3-70B": 11.0, "Llama-3.2-3B": 2.0}, "async": RATES | {"tok/s": 170.0},
}  # fmt: skip


def test_the_table_names_every_miss(capsys: pytest.CaptureFixture[str]) -> None:
    recorded = kernels(
        result("qkv", 8, "swiftspec", 6.0),  # accept 7.0, goal 5.5
        result("qkv", 8, "cublas bf16", 9.0),  # 1.5 times as long: 2.3 wanted
        result("qkv", 8, "marlin", 9.0),  # 1.5 times: 1.4 wanted
        result("o", 8, "swiftspec", 6.0),
        result("o", 8, "swiftspec, summed", 8.0),  # 2 more: accept 2.5, goal 1.5
        result("down", 8, "swiftspec", 14.0),  # accept 13.1; Marlin would take 18
        result("down", 1, "swiftspec", 99.0),  # figures are for 8 rows
        result("down", 16, "swiftspec", 15.0),  # 1.07 times what 8 rows take
        result("attention 1000", 8, "swiftspec", 5.0),
        result("attention 1000", 8, "sdpa", 10.0),  # twice as long: 2.5 wanted
    )
    slower: list[dict[str, Any]] = [{"ops": ["unfused", "unfused"]}, {"early starts": False}]
    table = [DECODED, *(DECODED | other for other in slower)]
    assert verdicts(table, recorded) == {
        "Llama-3-70B TP4 qkv x8": "ok",
        "Llama-3-70B TP4 qkv x8 against cublas bf16": "MISS",
        "Llama-3-70B TP4 qkv x8 against marlin": "ok",
        "Llama-3-70B TP4 o x8": "ok",
        "Llama-3-70B TP4 o x8, what summing adds": "ok",
        "Llama-3-70B TP4 down x8": "MISS",
        "Llama-3-70B TP4 down x8 against Marlin's published (quoted)": "MISS",
        "Llama-3-70B TP4 down x16 against x8": "goal",
        "Llama-3-70B TP4 attention 1000 x8": "ok",
        "Llama-3-70B TP4 attention 1000 x8 against sdpa": "MISS",
        "step Llama-3-70B": "goal",
        "step Llama-3.2-3B": "MISS",
        "decode Llama-3-70B,Llama-3.2-3B": "ok",
        "decode Llama-3-70B,Llama-3.2-3B at once": "MISS",
    }
    gpu_report.report({"steps": [], "decodes": table}, recorded, None)
    printed = capsys.readouterr().out
    assert "on cuda and cuda, nothing early: " in printed, "shown, but held against nothing"
    assert "6 of 14 targets missed" in printed and "flashinfer: not importable" in printed
    gpu_report.report({"steps": [], "decodes": []}, None, None)  # nothing came back


def test_a_decode_that_ended_early_counts_as_far_as_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    early = {name: DECODED[name] for name in ("pair", "ops", "serial")}
    assert verdicts([early], None) == {"decode Llama-3-70B,Llama-3.2-3B": "ok"}
    gpu_report.report({"steps": [], "decodes": [early, {"pair": "x", "ops": ["cuda"]}]}, None, None)
    assert "serial 200 tok/s" in capsys.readouterr().out


def test_long_contexts_and_populations() -> None:
    ours = "swiftspec"
    recorded = kernels(
        result("attention 500", 8, ours, 5.0), result("attention 4000", 8, ours, 9.0),
        result("attention of", 8, ours, 9.0, "Llama-3-8B", 1), result("attention of", 64, ours, 20.0, "Llama-3-8B", 1),
    )  # fmt: skip
    found = verdicts([], recorded)
    assert found["Llama-3-70B TP4 attention 4000 x8 against context 500"] == "MISS"
    assert found["Llama-3-8B TP1 attention of 64 particles x320 against 8 particles"] == "goal"


def test_targets_are_the_published_table() -> None:
    """Those of a 70B over four ranks at 8 rows, assuming an H200; a slower card has longer."""
    want = {"qkv": (7.0, 5.5), "o": (6.3, 4.9), "swiglu": (22.7, 19.1), "down": (13.1, 10.8)}
    for op, (accept, goal) in want.items():
        moved = MAKE.linear("Llama-3-70B", 4, op, 8).moved
        target = targets.linear(moved, ASSUMED)
        assert target.accept == pytest.approx(accept, abs=0.1) and target.goal == pytest.approx(goal, abs=0.1)
        assert targets.linear(moved, Constants.of(None, 3000.0)).accept > target.accept
    moved = MAKE.attention("Llama-3-8B", 1, 1000, 8).moved
    assert targets.attention(moved, ASSUMED).accept <= 6.5
    moved = MAKE.attention("Llama-3-70B", 4, 1000, 8).moved
    assert targets.attention(moved, ASSUMED).accept == pytest.approx(5.4, abs=0.1)
    for rows, accept in ((8, 6.0), (64, 14.0)):
        assert targets.sampling(4 * rows * 128256, ASSUMED).accept == pytest.approx(accept, abs=0.1)
    for shape, (_, step) in targets.STEPS.items():
        assert asdict(targets.step(shape, ASSUMED) or step) == pytest.approx(asdict(step))


def test_marlins_published_times_are_met_and_joined_by_speed() -> None:
    for size, took in targets.MARLIN.items():
        assert targets.marlin_published(size, ASSUMED) == pytest.approx(took)
    between = targets.marlin_published(50.0, ASSUMED)
    assert between is not None and 20.3 < between < 38.1 and targets.marlin_published(10.0, ASSUMED) is None


def test_measured_constants_move_the_targets() -> None:
    """Each in the right direction, and by no more than it says."""
    moved, base = 61_370_000, targets.linear(61_370_000, ASSUMED)
    slow = targets.linear(moved, replace(ASSUMED, gap=1.85))
    assert slow.accept == pytest.approx(base.accept + 1) and slow.goal == pytest.approx(base.goal + 1)
    assert targets.linear(moved, replace(ASSUMED, read=4730.0)).accept < base.accept
    assert targets.linear(moved, replace(ASSUMED, exchange=9.0)) == base
    here = targets.step("Llama-3-70B", replace(ASSUMED, gap=0.35))
    then = targets.step("Llama-3-70B", ASSUMED)
    assert here is not None and then is not None
    assert then.accept - here.accept == pytest.approx(80 * 5 * 0.5e-3)
    found = {"constants": {"gap": 1.0, "copy": 9999.0}}
    on = Constants.of(found, 3000.0)
    assert (on.copy, on.gap, on.read, on.latency) == (3000.0, 1.0, 3000.0, ASSUMED.latency)


SAID = "gpu NVIDIA H200\ngap 1.1000 us\nplain_gap 1.9 us\nexchange 0.7 us\ncopy 4200.0 GB/s\nread_139kB 4410.0 GB/s\n"


@pytest.mark.parametrize("code", [0, 1])
def test_the_constants_that_were_said_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    """Whatever came of those after them, and the targets go with them."""
    program, file = tmp_path / "program", tmp_path / "constants.json"
    program.write_text(f"#!/bin/sh\nprintf '{SAID.encode('unicode_escape').decode()}'\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setattr(constants, "PROGRAM", program)
    monkeypatch.setattr(constants, "build", lambda: None)
    monkeypatch.setattr(sys, "argv", ["constants", "--json", str(file)])
    assert constants.main() == (2 if code else 0)
    found = json.loads(file.read_text())
    assert found["gpu"] == "NVIDIA H200" and found["more"] == {"plain_gap, us": 1.9, "read_139kB, GB/s": 4410.0}
    assert Constants.of(found, 4200.0).gap == 1.1
    assert found["targets"]["Llama-3-70B TP4 o x8, us"][0] == pytest.approx(6.32 + 0.25 + 2.77 * 0.0238, abs=0.03)
    printed = capsys.readouterr().out
    assert "not measured" in printed and "6.32 / 4.94" in printed


def test_a_program_that_hangs_or_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    said, problem = constants.run([sys.executable, "-uc", "print('gap 1 us'); import time; time.sleep(60)"], 2.0)
    assert said == "gap 1 us\n" and problem == "ended after 2 s"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert constants.build() == "nvcc not found"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_the_program_compiles_and_says_that_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    monkeypatch.setattr(constants, "PROGRAM", tmp_path / "constants")
    assert constants.build() is None
    said, problem = constants.run([str(constants.PROGRAM)], 10.0)
    assert said == "" and problem is not None and problem.startswith("no NVIDIA GPU can be used here")
