"""tests/gpu on the emulated GPU of tests/simt: the kernels' own code, from the bindings to the last instruction."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.simt.emulate import DEVICE_CODE, FLAGS, build

ROOT = Path(__file__).resolve().parent.parent
SIMT = ROOT / "tests" / "simt"
COMPILER = str(shutil.which("g++"))
FAULTS = ["nothing", "threads wait for ever", "lanes of a warp meet at", "outside of shared memory", "misaligned",
          "a block that has left", "unspecified launch failure"]  # fmt: skip

pytestmark = pytest.mark.skipif(shutil.which("g++") is None or sys.platform != "linux", reason="no g++, or no Linux")


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> str:
    program = str(tmp_path_factory.mktemp("faults") / "faults")
    sources = [str(SIMT / "faults.cpp"), str(SIMT / "simt" / "machine.cpp")]
    subprocess.run([COMPILER, *FLAGS, "-O1", DEVICE_CODE[0], f"-I{SIMT}", *sources, "-o", program], check=True)
    return program


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("which", "said"), list(enumerate(FAULTS)))
def test_a_fault_is_noticed(faults: str, which: int, said: str, seed: int) -> None:
    done = subprocess.run([faults, str(which), str(seed)], capture_output=True, text=True, timeout=60, check=True)
    assert said in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_a_gpu_must_pass(tmp_path: Path) -> None:
    """Every file of tests/gpu but those of library operators, each in a process of its own, two at a time."""
    module = build(COMPILER, tmp_path)
    environment = os.environ | {"SWIFTSPEC_EMULATED": str(module), "OMP_NUM_THREADS": "1"}
    names = ["graph", "cuda_ops", "sums", "model", "linear", "verify", "peers"]

    def run(name: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", f"tests/gpu/test_{name}.py"]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    with ThreadPoolExecutor(2) as pool:
        for name, done in zip(names, pool.map(run, names), strict=True):
            assert done.returncode == 0 and "%]" in done.stdout, f"{name}: {done.stdout[-4000:]}"
