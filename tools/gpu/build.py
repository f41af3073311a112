"""Builds the extension in place, unless the existing one is usable on this machine.

python -m tools.gpu.build
"""

from __future__ import annotations

import subprocess
import sys

from tools.gpu.steps import ROOT

LOOK = "from swiftspec import _C; print(_C.build_info); raise SystemExit(not _C.cuda_built)"


def main() -> int:
    found = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, cwd=ROOT)
    if found.returncode == 0:
        print(f"reusing the existing build: {found.stdout.strip()}")
        return 0
    return subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
