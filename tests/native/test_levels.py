"""Selection of ISA levels, also while operators run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.native.test_ll import build

pytestmark = pytest.mark.slow  # each test starts processes

SOURCES = ["tests/native/level_driver.cpp", "csrc/host/isa/level.cpp", "csrc/host/ops/threads.cpp"]


@pytest.mark.parametrize(
    "flags", [("-O1",), pytest.param(("-O1", "-g", "-fsanitize=thread"), marks=pytest.mark.slow)], ids=["plain", "tsan"]
)
def test_operators_run_at_the_selected_level(tmp_path: Path, flags: tuple[str, ...]) -> None:
    driver = build(tmp_path / "levels", SOURCES, *flags)
    run = subprocess.run([driver], capture_output=True, text=True, check=False, timeout=100)
    assert (run.returncode, run.stderr) == (0, "")
