"""Sums and gathers over a group of GPUs (csrc/cuda/peers/channel.h), launches as threads under ThreadSanitizer."""

from __future__ import annotations

import subprocess

import pytest

from tests.native.test_ll import NEAR_WRAP, build

pytestmark = pytest.mark.slow  # each test starts processes


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> str:
    flags = ("-O1", "-g", "-fsanitize=thread", "-fno-sanitize-recover=all")
    return build(tmp_path_factory.mktemp("ll") / "launches", ["tests/native/cuda_ll.cpp"], *flags)


@pytest.mark.parametrize("two_shot", [0, 1])
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("ranks", "epochs", "first"), [(2, 100, NEAR_WRAP), (4, 50, 0), (8, 20, 2**30 - 10)])
def test_launches_as_threads(launches: str, ranks: int, epochs: int, first: int, ahead: int, two_shot: int) -> None:
    """With random delays, across the wrap of the flags and a cleaning epoch. `ahead`: lines are sent an epoch early."""
    numbers = map(str, (ranks, epochs, first, ahead, two_shot))
    run = subprocess.run([launches, *numbers], capture_output=True, text=True, check=False, timeout=100)
    assert (run.returncode, run.stdout) == (0, "ok\n"), run.stdout + run.stderr
