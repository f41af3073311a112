"""Installs SwiftSpec and its requirements into this Python's environment, as `make install` does: pip installs torch
and the other packages while the extension, which does not depend on them, is compiled. Uses the standard library only.

    .venv/bin/python -m tools.install [--torch "torch==2.12.0"] [--index URL]

Without --torch, tools/torch_choice.py chooses it; a torch that is installed already is kept. pip writes no bytecode
here: Python writes that of the modules in use when they are first imported, which takes a fraction of the time.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tools.torch_choice import choose, driver_cuda

ROOT = Path(__file__).resolve().parents[1]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
COMPILE_CPU_S = 150  # of the C++ files, on the machine of bench/log/2026-11-28.md
POLL_INTERVAL_S = 0.2
MAX_ERROR_LINES = 40
BUILD_NOTES = ("swiftspec: CUDA kernels ", "swiftspec: compiling ")  # lines of setup.py that are no errors


def pip(*arguments: str, quiet: bool = True) -> None:
    """Runs pip. Raises SystemExit if it fails; pip has printed the reason. `quiet`: no progress bars and warnings."""
    command = [*PIP, *(["-qq"] if quiet else []), "install", "--no-compile", *arguments]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code != 0:
        raise SystemExit(code)


class Build:
    """The extension's build and the editable installation, in a process that writes to a log file."""

    def __init__(self, log: Path) -> None:
        self._log, self._file = log, log.open("w")
        command = [*PIP, "-v", "install", "--no-compile", "--no-deps", "--no-build-isolation", "-e", "."]
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"}
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdout=self._file, stderr=subprocess.STDOUT, env=environment
        )

    def failed(self) -> bool:
        """Returns whether the build has ended with an error."""
        return self._process.poll() not in (None, 0)

    def wait(self) -> None:
        """Waits for the end, and shows the number of compiled files if there is a terminal. Raises SystemExit with the
        compiler's message if the build fails."""
        shown = ""
        while self._process.poll() is None:
            time.sleep(POLL_INTERVAL_S)
            line = progress(self._log.read_text(errors="replace"))
            if line != shown and sys.stdout.isatty():
                print(f"\r== {line}\033[K", end="", flush=True)
                shown = line
        if shown:
            print()
        self._file.close()
        if self._process.returncode != 0:
            print(error_lines(self._log.read_text(errors="replace")), file=sys.stderr)
            raise SystemExit(f"== building swiftspec failed; {self._log} has the whole output")

    def stop(self) -> None:
        """Ends the build."""
        self._process.terminate()
        self._process.wait()
        self._file.close()


def progress(log: str) -> str:
    """Returns a line with ninja's latest counts, from the output of a build."""
    found = re.findall(r"^\s*\[(\d+)/(\d+)\]", log, re.MULTILINE)
    return f"compiled {found[-1][0]} of {found[-1][1]} files" if found else "configuring"


def error_lines(log: str) -> str:
    """Returns the part of a failed build's output that has the reason: from ninja's first FAILED on, or the last lines,
    and without lines of pip."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    start = next((at for at, line in enumerate(lines) if line.startswith("FAILED:")), None)
    if start is not None:
        return "\n".join(lines[start : start + MAX_ERROR_LINES])
    own = [line for line in lines if line.startswith("swiftspec: ") and not line.startswith(BUILD_NOTES)]
    return "\n".join(own or lines[-MAX_ERROR_LINES:])


def announcement(cores: int, torch: Sequence[str], *, has_gpu: bool) -> str:
    """Returns what is going to happen and how long it takes. `torch`: pip's arguments for torch, if it is installed."""
    minutes = max(round(COMPILE_CPU_S / cores / 60), 1)
    parts = [f"compiling C++ takes about {minutes} min on {cores} cores"]
    parts += ["CUDA kernels take minutes more, if there is nvcc"] if has_gpu else []
    parts += [f"meanwhile pip installs {' '.join(torch)}"] if torch else []
    return "; ".join(parts)


def torch_arguments(requested: str, index: str) -> list[str]:
    """Returns pip's arguments for torch; empty if an installed one is kept. `requested`: value of --torch."""
    if requested:
        return requested.split()
    if find_spec("torch") is not None:
        return []
    arguments, problem = choose(driver_cuda(), index)
    if problem is not None:
        print(f"== warning: {problem}", file=sys.stderr)
    return arguments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="", help="pip's arguments for torch")
    parser.add_argument("--index", default="", help="address of PyTorch's wheel index")
    args = parser.parse_args()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    torch = torch_arguments(args.torch, args.index)
    print(f"== {announcement(os.cpu_count() or 1, torch, has_gpu=driver_cuda() is not None)}", flush=True)
    pip(*settings["build-system"]["requires"])
    build = Build(Path(sys.prefix) / "build.log")
    try:
        if torch:
            pip(*torch, quiet=False)
        if not build.failed():
            print("== installing the other packages", flush=True)
            pip(*settings["project"]["dependencies"])
        build.wait()
    except BaseException:
        build.stop()
        raise


if __name__ == "__main__":
    main()
