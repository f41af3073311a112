"""Builds llama.cpp without its code for AMX: the Python package and `llama-server`, from the package's sources on PyPI.

    python -m bench.baselines.build_llama DIR [--version 0.3.36] [--jobs 2]
    python -m bench.large --llama-python DIR/venv/bin/python --llama-bin DIR/bin

llama.cpp 0.3.36 crashes on CPUs with AMX, which a default build uses. This build has all other instruction sets of the
CPU; DIR/bin/build.json records its flags. It needs cmake, ninja and a C++ compiler, and takes 10 to 20 minutes on one
core. Imports only the standard library, since the baselines use it too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
RECORD = "build.json"  # in bin/
# option of llama.cpp's CMake -> flag of /proc/cpuinfo
INSTRUCTIONS = {
    "GGML_SSE42": "sse4_2", "GGML_AVX": "avx", "GGML_AVX2": "avx2", "GGML_FMA": "fma", "GGML_F16C": "f16c",
    "GGML_BMI2": "bmi2", "GGML_AVX_VNNI": "avx_vnni", "GGML_AVX512": "avx512f", "GGML_AVX512_VBMI": "avx512vbmi",
    "GGML_AVX512_VNNI": "avx512_vnni", "GGML_AVX512_BF16": "avx512_bf16",
}  # fmt: skip
AMX = ("GGML_AMX_TILE", "GGML_AMX_INT8", "GGML_AMX_BF16")
SERVER_ONLY = {
    "CMAKE_BUILD_TYPE": "Release", "BUILD_SHARED_LIBS": "ON", "LLAMA_BUILD_SERVER": "ON", "LLAMA_BUILD_TOOLS": "ON",
    "LLAMA_BUILD_TESTS": "OFF", "LLAMA_BUILD_EXAMPLES": "OFF", "LLAMA_BUILD_APP": "OFF", "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF", "LLAMA_OPENSSL": "OFF", "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
    "CMAKE_INSTALL_RPATH": "$ORIGIN",
}  # fmt: skip


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Returns the flags of the CPU, or no flags if the system does not report them."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), frozenset())


def has_amx(features: frozenset[str] | None = None) -> bool:
    """Returns whether the CPU has AMX for int8, which llama.cpp's quantised products use."""
    return "amx_int8" in (cpu_features() if features is None else features)


def instruction_flags(features: frozenset[str]) -> dict[str, str]:
    """Returns the CMake options for the instruction sets of a CPU, without AMX."""
    chosen = {option: "ON" if flag in features else "OFF" for option, flag in INSTRUCTIONS.items()}
    return {"GGML_NATIVE": "OFF", **chosen, **dict.fromkeys(AMX, "OFF")}


def describe_build(version: str, amx: bool | None) -> str:
    """Returns the name of a build of llama.cpp for a report. `amx`: whether it uses AMX; None if unknown."""
    return version if amx is None else f"{version}, built {'with' if amx else 'without'} AMX"


def recorded_amx(bin_dir: Path) -> bool | None:
    """Returns whether the build in a folder uses AMX, from its build.json, or None without a valid one."""
    try:
        flags = json.loads((bin_dir / RECORD).read_text(encoding="utf-8"))["flags"]
    except (OSError, ValueError, KeyError):
        return None
    return any(flags.get(name) == "ON" for name in AMX)


def crash_advice(features: frozenset[str] | None = None) -> str:
    """Returns what to append to the report of a crash of llama.cpp: how to build it without AMX, on a CPU with AMX."""
    if not has_amx(features):
        return ""
    return "; if it was built with AMX, build it without: python -m bench.baselines.build_llama DIR"


def build(folder: Path, version: str, jobs: int) -> None:
    """Builds llama.cpp in `folder`: bin/ with llama-server and its libraries, venv/ with the Python package."""
    sources, bin_dir, made = folder / "src", folder / "bin", folder / "build"
    unpacked = _download(sources, version)
    flags = instruction_flags(cpu_features())
    options = [f"-D{name}={value}" for name, value in (SERVER_ONLY | flags).items()]
    _run(["cmake", "-S", str(unpacked / "vendor" / "llama.cpp"), "-B", str(made), "-G", "Ninja", *options])
    _run(["cmake", "--build", str(made), "--target", "llama-server", "--parallel", str(jobs)])
    shutil.rmtree(bin_dir, ignore_errors=True)
    shutil.copytree(made / "bin", bin_dir, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    _run([sys.executable, "-m", "venv", str(folder / "venv")])
    _run([str(python), "-m", "pip", "install", "-q", str(unpacked)], {"CMAKE_ARGS": "-DLLAMA_BUILD=OFF"})
    where = "import importlib.util; print(importlib.util.find_spec('llama_cpp').submodule_search_locations[0])"
    package = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    (Path(package) / "lib").mkdir(exist_ok=True)
    for library in made.glob("bin/*.so*"):
        shutil.copy(library, Path(package) / "lib", follow_symlinks=False)
    record = {"package": f"{PACKAGE} {version}", "flags": flags}
    (bin_dir / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _download(sources: Path, version: str) -> Path:
    """Downloads and unpacks the source distribution. Returns its folder."""
    sources.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", PACKAGE, "-d", str(sources)]
    _run([*pip, f"{PACKAGE}=={version}"])
    name = f"{PACKAGE.replace('-', '_')}-{version}"
    with tarfile.open(sources / f"{name}.tar.gz") as archive:
        archive.extractall(sources, filter="data")
    return sources / name


def _run(command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    """Runs a program. Raises SystemExit with one line if it fails."""
    try:
        code = subprocess.run(command, env={**os.environ, **(env or {})}, check=False).returncode
    except OSError as error:
        sys.exit(f"build_llama: {command[0]}: {error.strerror}; install it first")
    if code:
        sys.exit(f"build_llama: {' '.join(command[:3])} failed with code {code}")


def main(argv: list[str] | None = None) -> None:
    """Parses the command line and builds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for sources, build files, bin/ and venv/")
    parser.add_argument("--version", default=VERSION, help=f"of {PACKAGE}")
    parser.add_argument("--jobs", type=int, default=1, help="compilers at a time")
    args = parser.parse_args(argv)
    folder = args.folder.resolve()
    build(folder, args.version, args.jobs)
    print(f"--llama-python {folder}/venv/bin/python --llama-bin {folder}/bin")


if __name__ == "__main__":
    main()
