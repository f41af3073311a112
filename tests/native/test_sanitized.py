"""The native operators under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, without Python."""

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
    """The driver with all of csrc/host but the other levels; skips where the compiler has no such sanitizer."""
    probe, out = folder / "probe.cpp", folder / "driver"
    probe.write_text("int main() { return 0; }\n")
    flags = [str(COMPILER), "-std=c++20", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-pthread"]
    linked = subprocess.run([*flags, str(probe), "-o", str(out)], capture_output=True, check=False)
    if linked.returncode != 0 or subprocess.run([out], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"no working -fsanitize={sanitizer} here")
    here, host = ROOT / "tests/native", sorted((ROOT / "csrc/host").rglob("*.cpp"))
    slow = [ROOT / f"csrc/host/isa/level_{name}.cpp" for name in levels]
    quick = [source for source in host if not source.stem.startswith("level_")]
    sources = [*slow, here / "host_driver.cpp", here / "no_levels.cpp", *quick]

    # with addresses checked, optimising takes three times as long as all the rest
    level = "-O1" if sanitizer == "thread" else "-O0"

    def compiled(source: Path) -> str:
        target = str(folder / f"{source.stem}.o")
        subprocess.run([*flags, level, "-g1", f"-I{ROOT / 'csrc'}", "-c", str(source), "-o", target], check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sources))
    subprocess.run([*flags, *objects, "-o", str(out)], check=True)
    return out


# the first has float32 of the vnni level; what this CPU does not run is compiled by every build
EVERY = ("avx512_bf16", "avx512", "avx512_vnni", "avx2") if _C.level().startswith("avx512") else ("avx2",)
RUN = ("avx512_bf16", "avx512", "avx2")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("sanitizer", "levels"),
    [
        pytest.param("address,undefined", EVERY, marks=pytest.mark.slow),
        # how threads share the work is the same code at every level
        pytest.param("thread", ("avx2",), marks=pytest.mark.slow),
        pytest.param("thread", EVERY, marks=pytest.mark.long),
    ],
)
def test_native_operators(tmp_path: Path, sanitizer: str, levels: Sequence[str]) -> None:
    driver = build(tmp_path, sanitizer, levels)
    run = subprocess.run([driver, *(x for x in RUN if x in levels)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    assert "Sanitizer" not in run.stderr
