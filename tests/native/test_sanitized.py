"""The native CPU operators under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, without Python."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swiftspec import _C

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("g++") or shutil.which("clang++")


def build(folder: Path, sanitizer: str, levels: Sequence[str]) -> Path:
    """Builds the driver with csrc/host and the given ISA levels; skips if the compiler lacks the sanitizer."""
    probe, out = folder / "probe.cpp", folder / "driver"
    probe.write_text("int main() { return 0; }\n")
    flags = [str(COMPILER), "-std=c++20", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-pthread"]
    linked = subprocess.run([*flags, str(probe), "-o", str(out)], capture_output=True, check=False)
    if linked.returncode != 0 or subprocess.run([out], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"no working -fsanitize={sanitizer} here")
    drivers, host = ROOT / "tests/native", sorted((ROOT / "csrc/host").rglob("*.cpp"))
    level_sources = [ROOT / f"csrc/host/isa/level_{name}.cpp" for name in levels]
    other_sources = [source for source in host if not source.stem.startswith("level_")]
    sources = [*level_sources, drivers / "host_driver.cpp", drivers / "no_levels.cpp", *other_sources]

    # with AddressSanitizer, optimising would take three times as long as everything else
    level = "-O1" if sanitizer == "thread" else "-O0"

    def compiled(source: Path) -> str:
        target = str(folder / f"{source.stem}.o")
        subprocess.run([*flags, level, "-g1", f"-I{ROOT / 'csrc'}", "-c", str(source), "-o", target], check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sources))
    subprocess.run([*flags, *objects, "-o", str(out)], check=True)
    return out


# A level refers to those below it. AddressSanitizer does not see what tile instructions read and write; test_tiles.py
# runs the same kernels on emulated ones, and the other operators of level amx are those of avx512_bf16.
AVX512 = ("avx512_bf16", "avx512", "avx512_vnni", "avx2")
NEON = ("neon_dotprod", "neon")
LEVELS = {"amx": ("amx", *AVX512), "avx512_bf16": AVX512, **dict.fromkeys(NEON, NEON)}.get(_C.level(), ("avx2",))
RUN_LEVELS = ("amx", "avx512_bf16", "avx512", "avx2", *NEON)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("sanitizer", "levels"),
    [
        pytest.param("address,undefined", LEVELS[LEVELS[0] == "amx" :], marks=pytest.mark.slow),
        # the thread pool is the same code at every level
        pytest.param("thread", LEVELS[-1:], marks=pytest.mark.slow),
        pytest.param("address,undefined", LEVELS, marks=pytest.mark.long),
        pytest.param("thread", LEVELS, marks=pytest.mark.long),
    ],
)
def test_native_operators(tmp_path: Path, sanitizer: str, levels: Sequence[str]) -> None:
    driver = build(tmp_path, sanitizer, levels)
    run = subprocess.run([driver, *(x for x in RUN_LEVELS if x in levels)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    assert "Sanitizer" not in run.stderr
