"""The command `python -m bench.paper`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.data.heldout import ROOT
from bench.paper.__main__ import build_parser, check_servers
from swiftspec.errors import UserError


@pytest.mark.parametrize(
    ("flags", "pairs", "cause"),
    [
        (["--server", "a=http://host", "--emulate", "paper"], 1, "emulated"),
        (["--server", "a=http://host"], 2, "one --pair"),
        (["--server", "all=http://host"], 1, "names of this project's systems"),
    ],
)
def test_servers_that_cannot_be_compared(flags: list[str], pairs: int, cause: str) -> None:
    with pytest.raises(UserError, match=cause):
        check_servers(build_parser().parse_args(flags), pairs)


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
