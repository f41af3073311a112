"""Builds the native extension with CMake and Ninja. Everything else is in pyproject.toml.

Environment:

- SWIFTSPEC_CUDA: 0 skips CUDA, 1 fails if CUDA cannot be built; unset builds CUDA if there is an NVIDIA GPU and nvcc
  works.
- SWIFTSPEC_CUDA_ARCHS: all, or some of 80, 86, 89, 90, 100, 120; fails if CUDA cannot be built. Unset builds for the
  GPUs of this machine; without a GPU and with SWIFTSPEC_CUDA=1, for 90.
- SWIFTSPEC_STAMPS: 1 builds CUDA kernels that record clocks, for `bench.gpu.stamps`; use it with `--build-lib`, so that
  it does not replace the usual extension.
- SWIFTSPEC_WERROR: 1 turns compiler warnings into errors.
- CXX, CUDACXX: the compilers.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
ARCHS = (80, 86, 89, 90, 100, 120)  # ten times the compute capability
HOPPER = DEFAULT_ARCH = 90


def find_nvcc() -> str | None:
    """The CUDA compiler: CUDACXX, then PATH, then the usual installation folders, then pip's packages."""
    homes: list[str | None] = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    homes += sorted(map(str, Path(sysconfig.get_path("purelib"), "nvidia").glob("*")), reverse=True)
    candidates = [os.environ.get("CUDACXX"), "nvcc", *(f"{home}/bin/nvcc" for home in homes if home)]
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


def run_quietly(*command: str) -> str:
    """The output of a program; empty if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def capabilities() -> list[int]:
    """Ten times the compute capability of each GPU, from nvidia-smi or else from the driver."""
    output = run_quietly("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    found = [int(major) * 10 + int(minor) for major, minor in re.findall(r"(\d+)\.(\d)", output)]
    return found or driver_capabilities()


def driver_capabilities() -> list[int]:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    found, count, device, value = [], *(ctypes.c_int() for _ in range(3))
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    for ordinal in range(count.value):
        numbers = []
        for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
            driver.cuDeviceGet(ctypes.byref(device), ordinal)
            driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            numbers.append(value.value)
        found.append(10 * numbers[0] + numbers[1])
    return found


def select_archs(requested: str, gpus: list[int]) -> list[int]:
    """The architectures to compile for: the requested ones, those of the GPUs here, or else Hopper.

    Raises SystemExit for an unknown name. Empty if no kernel supports the GPUs here.
    """
    if requested == "all":
        return list(ARCHS)
    if requested:
        names = requested.replace(",", " ").replace(";", " ").split()
        wrong = [name for name in names if not name.isdigit() or int(name) not in ARCHS]
        if wrong:
            known = ", ".join(map(str, ARCHS))
            raise SystemExit(
                f"swiftspec: SWIFTSPEC_CUDA_ARCHS: unknown architecture {wrong[0]}; use all, or some of {known}"
            )
        return sorted(set(map(int, names)))
    if not gpus:
        return [DEFAULT_ARCH]
    # what is compiled for 8.6 runs on 8.7 and 8.9 as well, but not on 9.0
    fitting = [[arch for arch in ARCHS if arch // 10 == gpu // 10 and arch <= gpu] for gpu in gpus]
    return sorted({fit[-1] for fit in fitting if fit})


def cuda_problem(nvcc: str | None, archs: list[int], gpus: list[int]) -> str | None:
    """Why CUDA cannot be built here, or None. Builds a small program to detect an old, broken or incomplete toolkit."""
    if not archs:
        return (
            f"compute capability {gpus[0] // 10}.{gpus[0] % 10} is not supported; supported are 8.x, 9.0, 10.x and 12.x"
        )
    if nvcc is None:
        return "nvcc not found"
    known = run_quietly(nvcc, "--list-gpu-arch").split()
    missing = [f"sm_{arch}" for arch in archs if known and f"compute_{arch}" not in known]
    if missing:
        return f"{nvcc} does not support {', '.join(missing)}; install a newer CUDA toolkit or set SWIFTSPEC_CUDA_ARCHS"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cu"
        source.write_text("#include <cstdint>\n__global__ void probe(uint32_t* out) { *out = 1; }\nint main() {}\n")
        command = [nvcc, "-std=c++20", f"-arch=sm_{archs[0]}", str(source), "-o", f"{folder}/probe"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode == 0:
        return None
    lines = [line.strip() for line in (run.stderr + run.stdout).splitlines() if line.strip()]
    first = next((line for line in lines if "error" in line.lower() or "fatal" in line.lower()), "no message")
    plain = "".join(c if c.isalnum() or c in " .,:()_-+=/" else " " for c in first)  # passed through CMake as text
    return f"{nvcc} cannot compile for sm_{archs[0]} ({plain})"


def choose_cuda() -> tuple[str | None, list[int], str]:
    """Returns the nvcc to build with (None: without CUDA), the architectures, and the build info line."""
    requested, named = (os.environ.get(name, "").strip().lower() for name in ("SWIFTSPEC_CUDA", "SWIFTSPEC_CUDA_ARCHS"))
    if requested in ("0", "off", "no", "false"):
        return None, [], "CUDA kernels left out: SWIFTSPEC_CUDA=0"
    required = named != "" or requested in ("1", "on", "yes", "true")
    gpus = [] if named else capabilities()
    if not gpus and not required:
        return None, [], "CUDA kernels left out: no NVIDIA GPU at build time (SWIFTSPEC_CUDA=1 builds them anyway)"
    nvcc, archs = find_nvcc(), select_archs(named, gpus)
    problem = cuda_problem(nvcc, archs, gpus)
    if problem is None:
        return nvcc, archs, f"CUDA kernels built for {', '.join(f'sm_{arch}' for arch in archs)}"
    if required:
        raise SystemExit(f"swiftspec: {'SWIFTSPEC_CUDA_ARCHS' if named else 'SWIFTSPEC_CUDA'} is set, but {problem}")
    return None, [], f"CUDA kernels left out: {problem}"


def require_tools() -> None:
    """Raises SystemExit with one line if a build tool or Python's headers are missing, before CMake runs."""
    chosen = os.environ.get("CXX", "").split(" ")[0]
    if not any(shutil.which(name) for name in (chosen, "c++", "g++", "clang++")):
        raise SystemExit("swiftspec: no C++ compiler found; install g++ or clang++, or set CXX")
    missing = [name for name in ("cmake", "ninja") if shutil.which(name) is None]
    if missing:
        raise SystemExit(f"swiftspec: {' and '.join(missing)} not found; install with: pip install {' '.join(missing)}")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise SystemExit("swiftspec: Python.h not found; install the development headers of this Python")


class CMakeBuild(build_ext):
    """Builds the extension with CMake, incrementally in build/."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        require_tools()
        nvcc, archs, info = choose_cuda()
        print(f"swiftspec: {info}", file=sys.stderr, flush=True)
        if nvcc:
            print(f"swiftspec: compiling with {nvcc}, which takes minutes", file=sys.stderr, flush=True)
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        stamps = bool(nvcc) and os.environ.get("SWIFTSPEC_STAMPS") == "1"
        kind = "stamps" if stamps else "cuda" if nvcc else "host"
        tag = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}-{kind}"
        build_dir = ROOT / "build" / f"cmake-{tag}"
        flags = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_MAKE_PROGRAM": shutil.which("ninja") or "ninja",
            "CMAKE_LIBRARY_OUTPUT_DIRECTORY": str(target.parent),
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
            "SWIFTSPEC_CUDA": "ON" if nvcc else "OFF",
            "SWIFTSPEC_BUILD_INFO": info,
            "SWIFTSPEC_STAMPS": "ON" if stamps else "OFF",
            "SWIFTSPEC_WERROR": "ON" if os.environ.get("SWIFTSPEC_WERROR") == "1" else "OFF",
        }
        if nvcc:
            # 9.0 with its own features: wgmma
            real = ";".join(f"{arch}{'a' if arch == HOPPER else ''}-real" for arch in archs)
            flags |= {"CMAKE_CUDA_COMPILER": nvcc, "CMAKE_CUDA_ARCHITECTURES": real}
            flags["SWIFTSPEC_CUDA_ARCHS"] = ",".join(map(str, archs))
        defines = [f"-D{name}={value}" for name, value in flags.items()]
        target.parent.mkdir(parents=True, exist_ok=True)
        for step in (
            ["cmake", "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja", *defines],
            ["cmake", "--build", str(build_dir)],
        ):
            if subprocess.run(step, check=False).returncode != 0:
                raise SystemExit(f"swiftspec: building the native extension failed at: {' '.join(step[:4])}")


if __name__ == "__main__":
    setup(ext_modules=[Extension("swiftspec._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
