"""The NEON levels of the native CPU operators, cross-compiled and run on emulated CPUs: all results are bitwise those
of level avx2 on this CPU."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from swiftspec import _C
from tests.native.test_levels import SOURCES as LEVEL_SOURCES
from tests.native.test_ll import ROOT, build
from tests.native.test_ll import SOURCES as LL_SOURCES

CROSS, QEMU = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
OPTIONS = ("-O1", "-ffp-contract=off", "-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-psabi")
# emulated CPUs, and the levels that each supports, the preferred one first
CPUS = {"max": ("neon_dotprod", "neon"), "cortex-a53": ("neon",)}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CROSS is None, reason="no aarch64-linux-gnu-g++; install g++-aarch64-linux-gnu"),
    pytest.mark.skipif(QEMU is None, reason="no qemu-aarch64; install qemu-user"),
    pytest.mark.skipif("avx2" not in _C.levels(), reason="no x86-64 with AVX2, whose results are the reference"),
]


def build_cross(out: Path, sources: Sequence[str], *flags: str) -> str:
    """Compiles for aarch64. The program is static, since the libraries of the emulated system may be missing."""
    common = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-pthread", "-static", "-Icsrc"]
    subprocess.run([str(CROSS), *common, *flags, *sources, "-o", str(out)], cwd=ROOT, check=True)
    return str(out)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{command}: {done.stdout[-500:]}{done.stderr[-2000:]}"
    return done.stdout


def emulate(driver: str, *arguments: str, cpu: str = "max") -> str:
    return run(str(QEMU), "-cpu", cpu, driver, *arguments)


def operator_sources(folder: Path, *apart: str, levels: bool) -> list[str]:
    """The driver of all operators with csrc/host. `apart`: file names; `levels`: whether to compile other ISA levels.

    Most files are included in one, since the headers of the standard library take most of the time.
    """
    host = [ROOT / "tests/native/host_driver.cpp", *sorted((ROOT / "csrc/host").rglob("*.cpp"))]
    included = [path for path in host if path.stem not in apart and (levels or not path.stem.startswith("level_"))]
    all_of_them = folder / "all.cpp"
    all_of_them.write_text("".join(f'#include "{path}"\n' for path in included))
    return [str(all_of_them), *(str(path) for path in host if path.stem in apart)]


@pytest.fixture(scope="module")
def operators(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """The cross-compiled driver of all operators, and what it prints for level avx2 on this CPU."""
    here, there = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("aarch64")
    # pack_blocks.cpp and pack.cpp have constants of the same name
    sources = operator_sources(here, "pack_blocks", "level_avx2", levels=False)
    driver = build(here / "driver", [*sources, "tests/native/no_levels.cpp"], *OPTIONS, "-O0")
    sources = operator_sources(there, "pack_blocks", "level_neon", "level_neon_dotprod", levels=True)
    return build_cross(there / "driver", sources, *OPTIONS), run(driver, "once", "avx2").splitlines()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cpu", CPUS)
def test_operators_have_the_results_of_avx2(cpu: str, operators: tuple[str, list[str]]) -> None:
    driver, (_, *expected) = operators
    best, *results = emulate(driver, "once", CPUS[cpu][0], cpu=cpu).splitlines()
    assert best == CPUS[cpu][0]
    assert len(expected) > 150 and results == expected


def test_an_emulated_cpu_without_dot_products_refuses_their_level(operators: tuple[str, list[str]]) -> None:
    assert emulate(operators[0], "once", "neon_dotprod", cpu="cortex-a53").splitlines() == ["neon"]


def test_vector_functions_have_the_results_of_avx2(tmp_path: Path) -> None:
    sources = ["tests/native/vector_driver.cpp"]
    expected = run(build(tmp_path / "here", sources, *OPTIONS)).splitlines()
    results = emulate(build_cross(tmp_path / "aarch64", sources, *OPTIONS)).splitlines()
    assert [line.split(" ", 1)[0] for line in results] == [line.split(" ", 1)[0] for line in expected]
    assert [line[:20] for line, other in zip(results, expected) if line != other] == []


def test_cuda_code_has_the_results_of_this_cpu(tmp_path: Path) -> None:
    sources = ["tests/native/tree_driver.cpp"]
    arguments = ("6", "8", "8", "48", "13", str(2**20), "0")
    expected = run(build(tmp_path / "here", sources, *OPTIONS), *arguments)
    assert emulate(build_cross(tmp_path / "tree", sources, *OPTIONS), *arguments) == expected

    sources = ["tests/native/sampling_driver.cpp", "csrc/host/ops/move_kv.cpp"]
    driver = build_cross(tmp_path / "sampling", sources, *OPTIONS)
    emulate(driver)
    parts = [np.arange(3000), 2**32 - 1 - np.arange(3000), np.arange(0, 2**32, 999_983)]
    bits = np.concatenate(parts).astype(np.uint32)
    noise = subprocess.run([str(QEMU), driver, "noise"], input=bits.tobytes(), capture_output=True, check=True).stdout
    host = np.empty(len(bits), dtype=np.float32)
    _C.gumbel_of(bits, host)
    assert noise == host.tobytes()


def test_levels_and_shared_memory(tmp_path: Path) -> None:
    emulate(build_cross(tmp_path / "levels", LEVEL_SOURCES, *OPTIONS))
    driver = build_cross(tmp_path / "threads", LL_SOURCES, *OPTIONS)
    for arguments in (("sum", "2", "4", "100", "0"), ("ring", "8", "500", "0"), ("shm", "2")):
        assert emulate(driver, *arguments) == "ok\n"
