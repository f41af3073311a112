"""Instructions of the native extension: code for an ISA level uses only that level's registers, and all other code runs
on any x86-64 CPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from swiftspec import _C

OBJDUMP, QEMU = shutil.which("objdump"), shutil.which("qemu-x86_64")
LEVELS = ("avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx")
HEADER = re.compile(r"^[0-9a-f]+ <(\S+)>:$")
# A function's level: its namespace, or the function `<level>_kernels`, which runs only where the level is supported.
LEVEL = re.compile(r"9swiftspec4host(?:\d+(" + "|".join(sorted(LEVELS, key=len, reverse=True)) + r")(?:_kernels|\d|_))")
AVX, AVX512, TILES = (
    re.compile(r"%ymm|\tv[a-z]"),
    re.compile(r"%zmm|%[xy]mm(?:1[6-9]|2\d|3[01])|%k[0-7]"),
    re.compile(r"%tmm"),
)
ALLOWED = {"": (), "avx2": (AVX,), "avx_vnni": (AVX,), "amx": (AVX, AVX512, TILES)}

pytestmark = pytest.mark.skipif("avx2" not in _C.levels(), reason="no x86-64 with AVX2")


def functions() -> Iterator[tuple[str, str]]:
    """Yields the name and the disassembly of each function of the extension."""
    assert OBJDUMP is not None and _C.__file__ is not None
    command = [OBJDUMP, "-d", "--no-show-raw-insn", _C.__file__]
    name, lines = "", list[str]()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as dump:
        assert dump.stdout is not None
        for line in dump.stdout:
            if found := HEADER.match(line):
                yield name, "".join(lines)
                name, lines = found[1], []
            else:
                lines.append(line)
    yield name, "".join(lines)


@pytest.mark.skipif(OBJDUMP is None, reason="no objdump")
@pytest.mark.slow
def test_functions_use_the_registers_of_their_level() -> None:
    seen, wrong = set[str](), list[str]()
    for name, code in functions():
        found = LEVEL.search(name)
        level = found[1] if found else ""
        seen.add(level)
        refused = {AVX, AVX512, TILES} - {*ALLOWED.get(level, (AVX, AVX512))}
        wrong += [f"{name}: {each[0]}" for pattern in refused if (each := pattern.search(code))]
    if seen == {""}:
        pytest.skip("the extension has no symbols")
    assert seen == {"", *LEVELS}
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.skipif(QEMU is None, reason="no qemu-x86_64")
@pytest.mark.slow
@pytest.mark.parametrize(("cpu", "levels"), [("Nehalem", []), ("max", ["avx2"])])
def test_the_levels_of_an_emulated_cpu(cpu: str, levels: list[str]) -> None:
    script = "\n".join(
        [
            "import numpy as np; from swiftspec import _C; print(_C.levels())",
            "out = np.empty((2, 40), np.float32)",
            "if _C.level() != 'none': _C.gumbel_rows(1, 2, np.array([3, 4], np.int32), 0, out); print(out.argmax())",
        ]
    )
    command = [str(QEMU), "-cpu", cpu, sys.executable, "-c", script]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert run.returncode == 0, run.stderr[-2000:]
    shown, *drawn = run.stdout.splitlines()
    assert shown == str(levels)
    if drawn:
        out = np.empty((2, 40), np.float32)
        _C.gumbel_rows(1, 2, np.array([3, 4], np.int32), 0, out)
        assert drawn == [str(out.argmax())]
