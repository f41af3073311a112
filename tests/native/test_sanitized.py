"""The native operators under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, without Python."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("g++") or shutil.which("clang++")


def build(folder: Path, sanitizer: str) -> Path:
    """The driver with all of csrc/host; skips where the compiler has no such sanitizer."""
    probe, out = folder / "probe.cpp", folder / "driver"
    probe.write_text("int main() { return 0; }\n")
    flags = [str(COMPILER), "-std=c++20", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-pthread"]
    linked = subprocess.run([*flags, str(probe), "-o", str(out)], capture_output=True, check=False)
    if linked.returncode != 0 or subprocess.run([out], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"no working -fsanitize={sanitizer} here")
    sources = [ROOT / "tests/native/host_driver.cpp", *sorted((ROOT / "csrc/host").rglob("*.cpp"))]

    def compiled(source: Path) -> str:
        target = str(folder / f"{source.stem}.o")
        subprocess.run([*flags, "-O1", "-g1", f"-I{ROOT / 'csrc'}", "-c", str(source), "-o", target], check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sources))
    subprocess.run([*flags, *objects, "-o", str(out)], check=True)
    return out


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_native_operators(tmp_path: Path, sanitizer: str) -> None:
    run = subprocess.run([build(tmp_path, sanitizer)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    assert "Sanitizer" not in run.stderr
