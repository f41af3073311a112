"""Products with matrix tiles, on emulated tile registers so that every machine with AVX2 runs them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from swiftspec import _C
from tests.native.test_ll import build

SOURCES = [
    "tests/native/tiles_driver.cpp", "tests/native/no_levels.cpp", "csrc/host/isa/level_avx2.cpp",
    *(f"csrc/host/{name}.cpp" for name in ("isa/level", "isa/cpu_levels", "ops/threads")),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in _C.levels(), reason="this CPU has no AVX2")
def test_products_with_tiles_are_bitwise_those_of_avx2(tmp_path: Path) -> None:
    """Under sanitizers, which see no access of a real tile instruction."""
    flags = ("-O0", "-g1", "-fsanitize=address,undefined")
    options = ("-ffp-contract=off", "-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-unused-function")
    driver = build(tmp_path / "tiles", SOURCES, *options, *flags)
    run = subprocess.run([driver], capture_output=True, text=True, check=False, timeout=300)
    assert (run.returncode, run.stderr) == (0, "")
