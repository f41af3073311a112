"""Build of the native extension: setuptools drives CMake with Ninja. Everything else is in pyproject.toml.

Environment: SWIFTSPEC_CUDA=0 leaves CUDA out, =1 fails where it cannot be built; unset, it is built where
nvcc works. SWIFTSPEC_WERROR=1 makes compiler warnings errors. CXX and CUDACXX choose the compilers.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CUDA_ARCH = "90a"


def find_nvcc() -> str | None:
    """The CUDA compiler: CUDACXX, then PATH, then the places where toolkits install themselves."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates = [os.environ.get("CUDACXX"), "nvcc", *(f"{home}/bin/nvcc" for home in homes if home)]
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


def cuda_problem(nvcc: str | None) -> str | None:
    """Why CUDA cannot be built here, or None. Compiles one small kernel: an old or broken toolkit shows."""
    if nvcc is None:
        return "nvcc not found"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cu"
        source.write_text("#include <cstdint>\n__global__ void probe(uint32_t* out) { *out = 1; }\n")
        command = [nvcc, "-std=c++20", f"-arch=sm_{CUDA_ARCH}", "-c", str(source), "-o", f"{folder}/probe.o"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode == 0:
        return None
    lines = [line.strip() for line in (run.stderr + run.stdout).splitlines() if line.strip()]
    first = next((line for line in lines if "error" in line.lower() or "fatal" in line.lower()), "no message")
    plain = "".join(c if c.isalnum() or c in " .,:()_-+=/" else " " for c in first)  # it travels through CMake as text
    return f"{nvcc} cannot compile for sm_{CUDA_ARCH} ({plain})"


def choose_cuda() -> tuple[str | None, str]:
    """The nvcc to build with (None: leave CUDA out) and the line that the build prints and records."""
    wish = os.environ.get("SWIFTSPEC_CUDA", "").strip().lower()
    if wish in ("0", "off", "no", "false"):
        return None, "CUDA kernels left out: SWIFTSPEC_CUDA=0"
    nvcc = find_nvcc()
    problem = cuda_problem(nvcc)
    if problem is None:
        return nvcc, f"CUDA kernels built for sm_{CUDA_ARCH}"
    if wish in ("1", "on", "yes", "true"):
        raise SystemExit(f"swiftspec: SWIFTSPEC_CUDA is set, but {problem}")
    return None, f"CUDA kernels left out: {problem}"


def require_tools() -> None:
    """One clear line for what a machine may lack, in place of a page of CMake."""
    chosen = os.environ.get("CXX", "").split(" ")[0]
    if not any(shutil.which(name) for name in (chosen, "c++", "g++", "clang++")):
        raise SystemExit("swiftspec: no C++ compiler found; install g++ or clang++, or set CXX")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise SystemExit("swiftspec: Python.h not found; install the development headers of this Python")


class CMakeBuild(build_ext):
    """Builds every extension through CMake, in build/ so that a second build compiles only what changed."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        require_tools()
        nvcc, info = choose_cuda()
        print(f"swiftspec: {info}", file=sys.stderr, flush=True)
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        tag = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}-{'cuda' if nvcc else 'host'}"
        build_dir = ROOT / "build" / f"cmake-{tag}"
        flags = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_MAKE_PROGRAM": shutil.which("ninja") or "ninja",
            "CMAKE_LIBRARY_OUTPUT_DIRECTORY": str(target.parent),
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
            "SWIFTSPEC_CUDA": "ON" if nvcc else "OFF",
            "SWIFTSPEC_BUILD_INFO": info,
            "SWIFTSPEC_WERROR": "ON" if os.environ.get("SWIFTSPEC_WERROR") == "1" else "OFF",
        }
        if nvcc:
            flags |= {"CMAKE_CUDA_COMPILER": nvcc, "CMAKE_CUDA_ARCHITECTURES": CUDA_ARCH}
        defines = [f"-D{name}={value}" for name, value in flags.items()]
        target.parent.mkdir(parents=True, exist_ok=True)
        for step in (
            ["cmake", "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja", *defines],
            ["cmake", "--build", str(build_dir)],
        ):
            if subprocess.run(step, check=False).returncode != 0:
                raise SystemExit(f"swiftspec: building the native extension failed at: {' '.join(step[:4])}")


setup(ext_modules=[Extension("swiftspec._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
