"""Architectures that a build compiles kernels for (setup.py), and its messages if it cannot."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swiftspec import _C

ROOT = Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc")
ALL = [80, 86, 89, 90, 100, 120]


def find_cuobjdump() -> str | None:
    """cuobjdump in PATH, next to nvcc or in the package nvidia-cuda-cuobjdump."""
    places = [Path(sysconfig.get_path("purelib")) / "nvidia/cu13/bin", Path("/usr/local/cuda/bin")]
    return shutil.which("cuobjdump") or shutil.which("cuobjdump", path=":".join(map(str, places)))


CUOBJDUMP = find_cuobjdump()


@pytest.fixture
def build() -> dict[str, Any]:
    """The definitions of setup.py."""
    return runpy.run_path(str(ROOT / "setup.py"), run_name="setup")


@pytest.fixture
def choose(build: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Returns a function that gives the build info line for GPUs, supported architectures and an environment."""

    def line(gpus: list[int], known: list[int] = ALL, nvcc: str | None = "/bin/nvcc", **environment: str) -> str:
        for name in ("SWIFTSPEC_CUDA", "SWIFTSPEC_CUDA_ARCHS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        functions = build["choose_cuda"].__globals__
        functions["capabilities"], functions["find_nvcc"] = lambda: gpus, lambda: nvcc
        functions["run_quietly"] = lambda *_: " ".join(f"compute_{arch}" for arch in known)
        done = SimpleNamespace(returncode=0)
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
        found, archs, message = build["choose_cuda"]()
        assert (found is None) == (archs == []) and "\n" not in message
        return message

    return line


@pytest.mark.parametrize(
    ("gpus", "named", "archs"),
    [
        ([90, 90], None, [90]),
        ([86], None, [86]),
        ([87, 121], None, [86, 120]),
        ([103, 75], None, [100]),
        ([75], "all", ALL),
        ([90], "120, 80", [80, 120]),
        ([90], "89;86 89", [86, 89]),
    ],
)
def test_a_build_is_for_the_present_or_named_gpus(
    choose: Callable[..., str], gpus: list[int], named: str | None, archs: list[int]
) -> None:
    message = choose(gpus, **({} if named is None else {"SWIFTSPEC_CUDA_ARCHS": named}))
    assert message == "CUDA kernels built for " + ", ".join(f"sm_{arch}" for arch in archs)


def test_without_a_gpu_kernels_are_built_only_if_requested(choose: Callable[..., str]) -> None:
    assert choose([]).startswith("CUDA kernels left out: no NVIDIA GPU at build time (SWIFTSPEC_CUDA=1 ")
    assert choose([], SWIFTSPEC_CUDA="1") == "CUDA kernels built for sm_90"
    assert choose([], SWIFTSPEC_CUDA_ARCHS="100") == "CUDA kernels built for sm_100"


def test_a_gpu_without_kernels_is_refused_with_the_reason(choose: Callable[..., str]) -> None:
    left_out = "CUDA kernels left out: "
    assert choose([75]) == left_out + "compute capability 7.5 is not supported; supported are 8.x, 9.0, 10.x and 12.x"
    assert choose([90], nvcc=None) == left_out + "nvcc not found"
    message = choose([120], [80, 86, 89, 90])
    assert message.startswith(left_out + "/bin/nvcc does not support sm_120; install a newer CUDA toolkit")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"SWIFTSPEC_CUDA_ARCHS": "75"},
            "SWIFTSPEC_CUDA_ARCHS: unknown architecture 75; use all, or some of 80, 86, 89,",
        ),
        ({"SWIFTSPEC_CUDA_ARCHS": "sm_90"}, "SWIFTSPEC_CUDA_ARCHS: unknown architecture sm_90; use all"),
        (
            {"SWIFTSPEC_CUDA_ARCHS": "all"},
            "SWIFTSPEC_CUDA_ARCHS is set, but /bin/nvcc does not support sm_100, sm_120; install",
        ),
        ({"SWIFTSPEC_CUDA": "1"}, "SWIFTSPEC_CUDA is set, but /bin/nvcc does not support sm_100; install"),
    ],
)
def test_a_requested_architecture_that_cannot_be_built_ends_the_build(
    choose: Callable[..., str], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(SystemExit, match=re.escape(message)):
        choose([100], [80, 86, 89, 90], **environment)


@pytest.mark.slow
def test_a_machine_without_a_gpu_builds_no_kernels(build: dict[str, Any]) -> None:
    if shutil.which("nvidia-smi") is None and not Path("/dev/nvidiactl").exists():
        assert build["capabilities"]() == []


def listed(file: Path | str) -> set[int]:
    listing = subprocess.run([str(CUOBJDUMP), "--list-elf", str(file)], capture_output=True, text=True, check=True)
    return {int(arch) for arch in re.findall(r"\bsm_(\d+)a?\b", listing.stdout)}


@pytest.mark.slow
@pytest.mark.skipif(CUOBJDUMP is None or NVCC is None, reason="no cuobjdump, or no nvcc")
def test_one_file_holds_all_architectures(tmp_path: Path) -> None:
    wanted = [flag for arch in ALL for flag in ("-gencode", f"arch=compute_{arch},code=sm_{arch}")]
    source, out = ROOT / "csrc/cuda/sampling/sampling.cu", tmp_path / "sampling.o"
    command = [str(NVCC), "-std=c++20", "-O3", *wanted, f"-I{ROOT / 'csrc'}", "-c", str(source), "-o", str(out)]
    subprocess.run(command, check=True)
    assert listed(out) == set(ALL)


@pytest.mark.slow
@pytest.mark.skipif(not _C.cuda_built or CUOBJDUMP is None, reason="CUDA left out, or no cuobjdump")
def test_the_extension_contains_what_its_build_info_lists() -> None:
    assert _C.__file__ is not None
    assert listed(_C.__file__) == set(_C.cuda_archs)


def test_nvcc_from_pip_is_found_last(build: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "nvidia/cu13/bin/nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.touch(0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: name if name == str(compiler) else None)
    assert build["find_nvcc"]() == str(compiler)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    assert build["find_nvcc"]() == "nvcc"


def test_missing_build_tools_are_named(build: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name in ("cmake", "ninja") else name)
    with pytest.raises(SystemExit, match="cmake and ninja not found; install with: pip install cmake ninja"):
        build["require_tools"]()
