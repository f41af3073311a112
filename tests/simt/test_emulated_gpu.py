"""tests/gpu on the emulated GPU of tests/simt: the kernels' own code, from the bindings to the last instruction."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.simt.emulate import AMPERE, FLAGS, HOPPER, build, device_code

ROOT = Path(__file__).resolve().parents[2]
SIMT = ROOT / "tests" / "simt"
COMPILER = str(shutil.which("g++"))
FAULTS = ["nothing", "nothing", "threads wait for ever", "lanes of a warp meet at", "outside of shared memory",
          "misaligned", "a block that has left", "a copy is under way", "unspecified launch failure", "a wrong sum",
          "did not wait for the launch in front"]  # fmt: skip
DIFFERENT = ("test_linear", "test_cuda_ops", "test_verify")  # from one form of the kernels to the other
LIBRARIES = ("test_unfused", "test_smc_graph")  # operators and graphs that are torch's

pytestmark = pytest.mark.skipif(shutil.which("g++") is None or sys.platform != "linux", reason="no g++, or no Linux")


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> str:
    program = str(tmp_path_factory.mktemp("faults") / "faults")
    sources = [str(SIMT / "faults.cpp"), *map(str, sorted(SIMT.glob("simt/*.cpp")))]
    subprocess.run(
        [COMPILER, *FLAGS, "-O1", device_code(HOPPER)[0], f"-I{SIMT}", f"-I{ROOT / 'csrc'}", *sources, "-o", program],
        check=True,
    )
    return program


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("which", "said"), list(enumerate(FAULTS)))
def test_a_fault_is_noticed(faults: str, which: int, said: str, seed: int) -> None:
    done = subprocess.run([faults, str(which), str(seed)], capture_output=True, text=True, timeout=60, check=True)
    assert said in done.stdout


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("arch", "only"),
    [
        pytest.param(HOPPER, DIFFERENT, marks=pytest.mark.slow),
        pytest.param(HOPPER, None, marks=pytest.mark.long),
        pytest.param(AMPERE, DIFFERENT, marks=pytest.mark.long),
    ],
)
def test_what_a_gpu_must_pass(tmp_path: Path, arch: int, only: tuple[str, ...] | None) -> None:
    """Every file of tests/gpu but those of library operators, each in a process of its own, two at a time; with every
    change, and without clusters and bulk copies, those whose kernels differ."""
    module = build(COMPILER, tmp_path, arch)
    environment = os.environ | {"SWIFTSPEC_EMULATED": str(module), "OMP_NUM_THREADS": "1"}
    files = [file for file in sorted((ROOT / "tests" / "gpu").glob("test_*.py")) if file.stem not in LIBRARIES]
    if only is not None:
        files = [file for file in files if file.stem in only]

    def run(file: Path) -> subprocess.CompletedProcess[str]:
        options = ("-m", "gpu", "-p", "no:cacheprovider", "-o", "addopts=", "--timeout", "400")
        command = [sys.executable, "-m", "pytest", *options, str(file)]
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False
        )

    with ThreadPoolExecutor(2) as pool:
        for file, done in zip(files, pool.map(run, files), strict=True):
            passed = re.search(r"(\d+) passed", done.stdout)
            assert done.returncode == 0 and passed is not None, f"{file.name}: {done.stdout[-4000:]}"
