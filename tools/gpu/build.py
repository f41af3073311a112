"""Builds the extension in place, unless the existing one runs on the GPU of this machine.

python -m tools.gpu.build
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys

from tools.gpu.steps import ROOT

# The extension may have been built without CUDA or for another GPU.
LOOK = """
from swiftspec.backends.cuda.devices import build_info, require_usable
from swiftspec.errors import UserError
try:
    require_usable("cuda")
except UserError as error:
    raise SystemExit(str(error))
print(build_info())
"""
BUILD_PROGRAMS, BUILD_MODULES = ("cmake", "ninja"), ("pybind11", "setuptools")


def look() -> tuple[bool, str]:
    """Returns whether the extension runs on this GPU, and its build info or the reason."""
    found = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, cwd=ROOT)
    said = (found.stdout if found.returncode == 0 else found.stderr).strip()
    return found.returncode == 0, said.rpartition("\n")[2]


def missing_tools() -> list[str]:
    """Returns the pip packages that a build needs and this machine lacks."""
    programs = [name for name in BUILD_PROGRAMS if shutil.which(name) is None]
    return programs + [name for name in BUILD_MODULES if importlib.util.find_spec(name) is None]


def main() -> int:
    usable, line = look()
    if usable:
        print(f"reusing the existing build: {line}")
        return 0
    print(f"building, since the existing extension is not usable: {line}", flush=True)
    if missing := missing_tools():
        print(f"a build needs {', '.join(missing)}: pip install {' '.join(missing)}")
        return 1
    built = subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=ROOT).returncode
    if built != 0:
        return built
    usable, line = look()
    print(line if usable else f"the new build is not usable: {line}")
    return 0 if usable else 1


if __name__ == "__main__":
    sys.exit(main())
