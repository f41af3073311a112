"""The command `python -m bench.paper`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.data.heldout import ROOT
from bench.paper.__main__ import parse_pair, parse_task
from swiftspec.errors import UserError


def test_pairs() -> None:
    name, (target, draft) = parse_pair("demo")
    assert name == "demo" and target.is_dir() and draft.is_dir()
    assert parse_pair("a-b=big,small") == ("a-b", (Path("big"), Path("small")))
    for text in ("other", "a=b", "a=b,", "../a=b,c"):
        with pytest.raises(UserError, match="--pair"):
            parse_pair(text)


def test_tasks() -> None:
    assert parse_task("gsm8k=test.jsonl") == ("gsm8k", Path("test.jsonl"))
    for text in ("gsm8k", "poems=file"):
        with pytest.raises(UserError, match="--tasks"):
            parse_task(text)


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
