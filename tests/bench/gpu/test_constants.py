"""bench/gpu/constants.py: parses the output of its program; handles a program that fails, hangs or cannot be built."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu import constants
from bench.gpu.targets import Constants

pytestmark = pytest.mark.slow  # each test starts processes

REPORTED = (
    "gpu NVIDIA H200\ngap 1.1000 us\nplain_gap 1.9 us\nexchange 0.7 us\ncopy 4200.0 GB/s\nread_139kB 4410.0 GB/s\n"
)


@pytest.mark.parametrize("code", [0, 1])
def test_reported_constants_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    """Constants that were reported before a failure are used, and the targets change with them."""
    program, file = tmp_path / "program", tmp_path / "constants.json"
    program.write_text(f"#!/bin/sh\nprintf '{REPORTED.encode('unicode_escape').decode()}'\nexit {code}\n")
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


def test_a_program_that_hangs_or_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    reported, problem = constants.run([sys.executable, "-uc", "print('gap 1 us'); import time; time.sleep(60)"], 2.0)
    assert reported == "gap 1 us\n" and problem == "timed out after 2 s"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert constants.build() == "nvcc not found"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_the_program_compiles_and_reports_a_missing_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    monkeypatch.setattr(constants, "PROGRAM", tmp_path / "constants")
    assert constants.build() is None
    reported, problem = constants.run([str(constants.PROGRAM)], 10.0)
    assert reported == "" and problem is not None and problem.startswith("no usable NVIDIA GPU")
