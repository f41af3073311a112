"""Runs a benchmark with another build of the native extension, such as one with SWIFTSPEC_STAMPS.

    python -m bench.gpu.with_extension build/stamps bench.gpu.stamps --model Llama-3-8B

The first argument is the folder that `setup.py build_ext --build-lib` wrote, then follow a module and its arguments.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
import sysconfig
from pathlib import Path

NAME = "swiftspec._C"


def use_extension(folder: Path) -> None:
    """Loads the extension below `folder` instead of the one in the package. Exits with one line if there is none."""
    file = folder / "swiftspec" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    spec = importlib.util.spec_from_file_location(NAME, file) if file.exists() else None
    if spec is None or spec.loader is None:
        raise SystemExit(f"there is no {file}: build it with setup.py build_ext --build-lib {folder}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[NAME] = module


def main() -> None:
    if len(sys.argv) < 3:
        raise SystemExit("usage: python -m bench.gpu.with_extension FOLDER MODULE [ARGUMENTS]")
    use_extension(Path(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
