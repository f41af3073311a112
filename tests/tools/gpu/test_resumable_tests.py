"""Tests that hang or end their process: the remaining ones still run, and each has an outcome."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.gpu.resumable_tests import Found, give_up, summary
from tools.gpu.steps import ROOT

TESTS = """
import os, pathlib, subprocess, time, pytest
def test_passes(): pass
def test_hangs():
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path(__file__).with_name("child").write_text(str(child.pid))
    child.wait()
def test_ends_the_process(): os._exit(9)
def test_breaks_the_gpu(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_fails(): assert 0, "just wrong"
@pytest.mark.skip
def test_skipped(): pass
def test_passes_too(): pass
"""


@pytest.mark.slow
def test_every_test_has_an_outcome(tmp_path: Path) -> None:
    file, found = tmp_path / "test_some.py", tmp_path / "found.json"
    file.write_text(TESTS)
    command = [sys.executable, "-m", "tools.gpu.resumable_tests", "--json", str(found), "--timeout", "10", "--mark", ""]
    bare = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # which take seconds, in every process
    done = subprocess.run([*command, str(file)], cwd=ROOT, capture_output=True, text=True, env=bare)
    outcomes = {name.rpartition("::")[2]: outcome for name, outcome in Found.read(found).outcomes.items()}
    assert done.returncode == 3, done.stderr
    assert {name for name, outcome in outcomes.items() if outcome == "passed"} == {"test_passes", "test_passes_too"}
    assert outcomes["test_hangs"] == "hung" and outcomes["test_ends_the_process"] == "ended the process (9)"
    assert "illegal memory access" in outcomes["test_breaks_the_gpu"] and "just wrong" in outcomes["test_fails"]
    child = Path("/proc", (tmp_path / "child").read_text(), "stat")
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z", "it was killed, too"
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["passed"], summary["skipped"], len(summary["failed"]), summary["not reached"]) == (2, 1, 4, [])


def test_a_process_that_reached_no_test_is_not_restarted(tmp_path: Path) -> None:
    assert not give_up(tmp_path / "found.json", "hung")
    Found(left=["b"], at="a").write(tmp_path / "found.json")
    assert give_up(tmp_path / "found.json", "hung")
    left = Found.read(tmp_path / "found.json")
    assert left.outcomes == {"a": "hung"} and summary(left)["not reached"] == ["b"]
