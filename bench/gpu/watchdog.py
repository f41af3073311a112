"""A process that measures or tests and may die or hang, which a GPU's errors make it do: begun again until it ends by
itself."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

PAUSE = 0.2  # seconds between two looks
FAILED = 3  # what a process leaves with that has come to its end, but not all is well; 1 is an exception's
BY_ITSELF = (0, FAILED)
LAST_WAIT = 10.0  # seconds


def watch(
    command: Sequence[str],
    file: Path,
    budget: float,
    patience: float,
    give_up: Callable[[Path, str], bool],
    start: float | None = None,
) -> int:
    """Runs `command --budget SECONDS_LEFT`, which writes `file` whenever it goes on and continues what it finds there.

    Where it dies, or has not written for `patience` seconds, `give_up(file, why)` notes what it was at and says whether
    there was something; if so, it is begun again while there is time. `start`: the seconds that it may take until it
    writes for the first time, `patience` unless told. Returns what the last one left with, 1 if it was ended.
    """
    until = time.monotonic() + budget
    while True:
        process = subprocess.Popen([*command, "--budget", f"{until - time.monotonic():.1f}"])
        code = _wait(process, file, patience, patience if start is None else start)
        if code in BY_ITSELF:
            return code
        went_on = give_up(file, "hung" if code is None else f"ended the process ({code})")
        if not went_on or time.monotonic() > until:
            return 1


def _wait(process: subprocess.Popen[bytes], file: Path, patience: float, start: float) -> int | None:
    """The exit code; None of a process that hung and was killed. One that the driver holds may outlive that."""
    seen, since, limit = _written(file), time.monotonic(), start
    while process.poll() is None:
        written = _written(file)
        if written != seen:
            seen, since, limit = written, time.monotonic(), patience
        if time.monotonic() - since > limit:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WAIT)
            return None
        time.sleep(PAUSE)
    return process.returncode


def _written(file: Path) -> int:
    return file.stat().st_mtime_ns if file.is_file() else 0
