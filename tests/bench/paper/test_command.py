"""The command `python -m bench.paper`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.data.heldout import ROOT


@pytest.mark.slow
def test_an_evaluation_without_enough_time(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "bench.paper", "--emulate", "paper", "--families", "nq", "--limit", "1", "--repeats", "1",
        "--max-tokens", "2", "--budget", "1s", "--output", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "demo" / "report.md").read_text(encoding="utf-8")
    assert "not all of it was measured" in report and "## Table 1" in report
    assert (tmp_path / "demo" / "results.jsonl").is_file()
