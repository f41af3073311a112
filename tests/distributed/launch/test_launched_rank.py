"""The environment variables of a launcher, and one-line errors for invalid values."""

from __future__ import annotations

import subprocess
import sys

import pytest

from swiftspec.distributed.launch.launched_rank import LaunchedRank, launched, own_rank
from swiftspec.errors import UserError

JOB = {"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "somewhere", "MASTER_PORT": "29500"}
TORCHRUN = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.mark.parametrize(
    "alone", [{}, {"RANK": "5"}, {"RANK": "x"}, {"RANK": "5", "WORLD_SIZE": "1"}, {"WORLD_SIZE": ""}]
)
def test_one_rank_alone_needs_no_launcher(alone: dict[str, str]) -> None:
    assert launched(alone) is None and own_rank(alone) == 0


def test_a_complete_launcher_environment() -> None:
    assert launched(JOB) == LaunchedRank(3, 4, 3, 4, "somewhere", 29500)
    more = {"TORCHELASTIC_RESTART_COUNT": "2"}
    assert launched(JOB | TORCHRUN | more) == LaunchedRank(3, 4, 1, 2, "somewhere", 29500, True, "2")
    assert own_rank(JOB) == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE must be a whole number in 1..4096, not '-1'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be"),
        ({"WORLD_SIZE": "x" * 10**6}, f"WORLD_SIZE must be a whole number in 1..4096, not '{'x' * 59}...{'x' * 9}'"),
        ({"WORLD_SIZE": "9" * 9999}, "WORLD_SIZE must be"),
        ({"WORLD_SIZE": "100000"}, "WORLD_SIZE must be"),
        ({"RANK": "7"}, "RANK must be a whole number in 0..3, not '7'"),
        ({"RANK": "--1"}, "RANK must be"),
        ({"RANK": ""}, "RANK is not"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE must be a whole number in 1..4"),
        ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK must be a whole number in 0..1, not '3'"),
        ({"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "LOCAL_RANK=0 of 2 does not match RANK=3 of 4"),
        ({"MASTER_ADDR": " "}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT must be a whole number in 1..65535"),
        ({"MASTER_PORT": "²"}, "MASTER_PORT must be"),
    ],
)
def test_an_invalid_value_is_one_line_that_names_the_variable(values: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        launched(JOB | values)
    text = str(caught.value)
    assert message in text and text.endswith("start several ranks with torchrun") and len(text) < 200
    assert own_rank(JOB | values) == 0, "somebody must say so"


@pytest.mark.slow
def test_the_launcher_imports_no_torch() -> None:
    code = "import sys, swiftspec.distributed.launch.launched_rank; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
