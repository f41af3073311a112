"""The command as a process: what --help imports, Ctrl-C, and a reader of the output that exits."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.toy_pair import CONTEXT, make_pair

pytestmark = pytest.mark.slow  # each test starts processes


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags that name a pair of models."""
    target, draft = make_pair(tmp_path_factory.mktemp("pair"))
    return ["--model", str(target), "--draft-model", str(draft), "--threads", "1"]


def start(argv: Sequence[str], flags: Sequence[str] = (), **options: Any) -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parents[2]
    return subprocess.Popen(
        [sys.executable, *flags, "-m", "swiftspec.serve", *argv], cwd=root, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, **options,
    )  # fmt: skip


def test_help_is_fast() -> None:
    """It imports none of the libraries that take long."""
    process = start(["--help"], flags=["-X", "importtime"])
    page, err = process.communicate(timeout=30)
    assert process.returncode == 0 and "--draft-model" in page
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in err.splitlines()}
    assert "swiftspec" in imported
    assert not imported & {"torch", "transformers", "numpy", "tokenizers", "safetensors", "grpc", "fastapi"}


@pytest.mark.slow
def test_ctrl_c_prints_the_partial_text_and_exits_with_130(pair: list[str]) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = start([*pair, "--prompt", "a", "--verify-batch", "1", "--ignore-eos"], env=environment)
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert (first + out).endswith("\n")
    assert "Traceback" not in err
    summary = re.search(r"stopped, (\d+) tok", err.splitlines()[-1])
    assert summary is not None and int(summary[1]) < CONTEXT - 5


@pytest.mark.slow
def test_a_reader_that_closes_the_pipe_early(pair: list[str]) -> None:
    process = start([*pair, "--prompt", "a", "--ignore-eos"])
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait(timeout=30) == 141
    assert "Traceback" not in err
