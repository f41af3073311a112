"""The command as a process of its own: how fast --help is, Ctrl-C, and a reader that goes away."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.toy_pair import CONTEXT, make_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags that name a pair."""
    target, draft = make_pair(tmp_path_factory.mktemp("pair"))
    return ["--model", str(target), "--draft-model", str(draft), "--threads", "1"]


def start(argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parents[2]
    return subprocess.Popen(
        [sys.executable, "-m", "swiftspec.serve", *argv], cwd=root, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, **options,
    )  # fmt: skip


def test_help_is_fast() -> None:
    taken = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        process = start(["--help"])
        page, err = process.communicate(timeout=30)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert (process.returncode, err) == (0, "")
        assert "--draft-model" in page
        # CPU time: on an idle machine it is the time, on a busy one it says what is ours
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(taken) < 0.5


@pytest.mark.slow
def test_ctrl_c_prints_what_came_and_leaves_with_130(pair: list[str]) -> None:
    environment = {**os.environ, "SWIFTSPEC_IGNORE_EOS": "1", "PYTHONUNBUFFERED": "1"}
    process = start([*pair, "--prompt", "a", "--verify-batch", "1"], env=environment)
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert (first + out).endswith("\n")
    assert "Traceback" not in err
    assert int(err.splitlines()[-1].split()[1]) < CONTEXT - 5  # so many tokens came


@pytest.mark.slow
def test_a_reader_that_leaves_early(pair: list[str]) -> None:
    process = start([*pair, "--prompt", "a", "--ignore-eos"])
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait(timeout=30) == 141
    assert "Traceback" not in err
