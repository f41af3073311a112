"""Chooses the torch that `make` installs, by the CUDA version of the NVIDIA driver. Uses the standard library only.

    python -m tools.torch_choice --works          exits with 0 if this Python's torch runs on the GPU and is kept
    python -m tools.torch_choice [--index URL]    prints pip's arguments

Without a GPU the version is pinned. torch from a package registry is built for CUDA 13, which an older driver does not
run. `--index`: address of PyTorch's wheel index, which has a folder for each CUDA version (cu126, cu128, cu130).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

WITHOUT_GPU = "torch==2.13.0"
WITH_GPU = "torch>=2.11"
MIN_TORCH = (2, 11)
REGISTRY_CUDA = (13, 0)  # of the torch in a package registry
BUILDS = ((13, 0), (12, 8), (12, 6))  # CUDA versions that torch is built for; each runs on all drivers of its major


def driver_cuda() -> tuple[int, int] | None:
    """Returns the CUDA version that the driver supports; None without a GPU."""
    try:
        said = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", said)
    return None if found is None else (int(found[1]), int(found[2]))


def choose(cuda: tuple[int, int] | None, index: str) -> tuple[list[str], str | None]:
    """Returns pip's arguments, and a line about what will not work, or None. `cuda`: version that the driver supports;
    None without a GPU. `index`: address of PyTorch's wheel index; empty: that of pip."""
    if cuda is None:
        return [WITHOUT_GPU], None
    build = next((each for each in BUILDS if each <= cuda), None)
    build = build or next((each for each in reversed(BUILDS) if each[0] == cuda[0]), None)  # 12.6 on a driver for 12.4
    has = f"the NVIDIA driver supports CUDA {cuda[0]}.{cuda[1]}"
    if build is None:
        return [WITH_GPU], f"{has}, which is too old for torch: the models run on the CPU; install a newer driver"
    if index:
        return ["--index-url", f"{index.rstrip('/')}/cu{build[0]}{build[1]}", WITH_GPU], None
    if build >= REGISTRY_CUDA:
        return [WITH_GPU], None
    return [WITH_GPU], (
        f"{has}, but the default torch needs {REGISTRY_CUDA[0]}.{REGISTRY_CUDA[1]}: the models run on the CPU; install"
        f" a newer driver, or set TORCH_INDEX to PyTorch's wheel index, whose folder cu{build[0]}{build[1]} fits"
    )


def works() -> str | None:
    """Returns the version of this Python's torch if it is new enough and runs on a GPU, else None."""
    try:
        import torch
    except (ImportError, OSError):
        return None
    version = str(torch.__version__)
    new = tuple(map(int, re.findall(r"\d+", version)[:2])) >= MIN_TORCH
    return version if new and torch.cuda.is_available() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", action="store_true", help="only check this Python's torch")
    parser.add_argument("--index", default="", help="address of PyTorch's wheel index")
    args = parser.parse_args()
    if args.works:
        version = works()
        if version is not None:
            print(f"== keeping the installed torch {version}")
        return 0 if version is not None else 1
    arguments, problem = choose(driver_cuda(), args.index)
    if problem is not None:
        print(f"== warning: {problem}", file=sys.stderr)
    print(*arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
