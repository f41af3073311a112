"""Runs tests/gpu on the emulated GPU of tests/simt, with the source of the kernels and bindings unchanged."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.simt.emulate import AMPERE, FLAGS, HOPPER, build, device_code

ROOT = Path(__file__).resolve().parents[2]
SIMT = ROOT / "tests" / "simt"
COMPILER = str(shutil.which("g++"))
FAULTS = ["nothing", "nothing", "threads wait for ever", "lanes of a warp meet at", "outside of shared memory",
          "misaligned", "a block that has left", "a copy is under way", "unspecified launch failure", "a wrong sum",
          "did not wait for the launch in front"]  # fmt: skip
# tests whose kernels differ between the architectures
DIFFERENT = ("test_linear", "test_append", "test_cuda_ops", "test_resampling", "test_float8", "test_verify")
MOST = ("test_linear",)  # of these, where most of the kernels differ
# of that, a shape without a split of K and one with, and launches of many rows
SHORT = "test_products and (64-32 or 512-72) or test_many_rows"
LIBRARIES = ("test_unfused",)  # operators of torch
STAMPS = ("test_stamps",)  # other builds skip it

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
@pytest.mark.parametrize(("which", "message"), list(enumerate(FAULTS)))
def test_a_fault_is_detected(faults: str, which: int, message: str, seed: int) -> None:
    done = subprocess.run([faults, str(which), str(seed)], capture_output=True, text=True, timeout=60, check=True)
    assert message in done.stdout


SPIN = """
import importlib.util, signal, sys
spec = importlib.util.spec_from_file_location("emulated", sys.argv[1])
emulated = importlib.util.module_from_spec(spec)
spec.loader.exec_module(emulated)
signal.signal(signal.SIGALRM, signal.default_int_handler)
for _ in range(2):
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        emulated.spin()
    except KeyboardInterrupt:
        print("interrupted")
emulated.finish()
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The module of an architecture, compiled on first use."""
    folder = tmp_path_factory.mktemp("emulated")
    return functools.cache(lambda arch: build(COMPILER, folder, arch))


@pytest.mark.long
def test_a_signal_ends_an_endless_kernel(module: Callable[[int], Path]) -> None:
    """For example the signal of pytest's timeout; the emulated GPU remains usable."""
    command = [sys.executable, "-c", SPIN, str(module(HOPPER))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("interrupted\n" * 2, 0), done.stderr


def run_tests(
    module: Path, files: Sequence[Path], which: str, cases: str, *more: str, seed: int = 1, limit: float = 850
) -> subprocess.CompletedProcess[str]:
    """Runs files of tests/gpu on the emulated GPU of `module`, two tests at a time; `which`: pytest's -k expression."""
    own = {"SWIFTSPEC_EMULATED": str(module), "SWIFTSPEC_EMULATED_CASES": cases, "OMP_NUM_THREADS": "1",
           "SWIFTSPEC_EMULATED_SEED": str(seed)}  # fmt: skip
    plugins = ("-p", "xdist.plugin", "-p", "pytest_timeout", "-p", "no:cacheprovider")  # other plugins import slowly
    options = ("-o", "addopts=", "-m", "gpu", "-k", which, "-n", "2", "--dist", "worksteal", "--timeout", "400", "-rp")
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *options, *more, *map(str, files)], cwd=ROOT, capture_output=True,
        text=True, timeout=limit, check=False, env=os.environ | own | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("arch", "only", "which", "cases"),
    [
        pytest.param(HOPPER, DIFFERENT, "", "few", marks=pytest.mark.long),
        pytest.param(AMPERE, MOST, SHORT, "few", marks=pytest.mark.long),
        pytest.param(HOPPER, None, "", "more", marks=pytest.mark.long),
        pytest.param(AMPERE, DIFFERENT, "", "more", marks=pytest.mark.long),
    ],
)
def test_the_gpu_tests_pass(
    module: Callable[[int], Path], arch: int, only: tuple[str, ...] | None, which: str, cases: str
) -> None:
    """Every file of tests/gpu except those of library operators; for Ampere, those whose kernels differ. The quick runs
    are limited to the most informative files and cases."""
    every = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    files = [file for file in every if file.stem not in (*LIBRARIES, *STAMPS)]
    if only is not None:
        files = [file for file in files if file.stem in only]
    done = run_tests(module(arch), files, which, cases)
    assert done.returncode == 0, done.stdout[-6000:]
    assert all(f"PASSED tests/gpu/{file.name}::" in done.stdout for file in files), done.stdout[-6000:]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_kernels_record_stamps(tmp_path: Path) -> None:
    """In a build with SWIFTSPEC_STAMPS, which other builds of the emulated GPU are not."""
    stamped = build(COMPILER, tmp_path, flags=("-O1", "-DSWIFTSPEC_STAMPS=1"))
    done = run_tests(stamped, [ROOT / "tests" / "gpu" / "test_stamps.py"], "", "few")
    assert done.returncode == 0 and "PASSED tests/gpu/test_stamps.py::" in done.stdout, done.stdout[-6000:]
