"""Watchdog for a measuring or testing process that a GPU error may end or block.

It restarts the process until it ends by itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

PAUSE = 0.2  # seconds between checks
FAILED = 3  # exit code of a process that finished with failures; 1 is the code of an exception
BY_ITSELF = (0, FAILED)
LAST_WAIT = 10.0  # timeout in seconds after a kill


def watch(
    command: Sequence[str],
    file: Path,
    budget: float,
    timeout_s: float,
    give_up: Callable[[Path, str], bool],
    start: float | None = None,
) -> int:
    """Runs `command --budget SECONDS_LEFT`, and restarts it when it crashes or hangs.

    The command must update `file` as it proceeds and continue from what it finds there. It has crashed if it exits with
    another code than 0 or FAILED, and hangs if it has not written for `timeout_s` seconds. Then `give_up(file, why)`
    marks the current item in `file` and returns whether the command can continue after it; if so, it is restarted while
    the `budget` in seconds lasts. `start`: limit until the first write, in seconds, by default `timeout_s`. Returns the
    exit code of the last process, or 1 if that crashed or hung.
    """
    until = time.monotonic() + budget
    while True:
        process = subprocess.Popen([*command, "--budget", f"{until - time.monotonic():.1f}"])
        code = _wait(process, file, timeout_s, timeout_s if start is None else start)
        if code in BY_ITSELF:
            return code
        went_on = give_up(file, "hung" if code is None else f"ended the process ({code})")
        if not went_on or time.monotonic() > until:
            return 1


def _wait(process: subprocess.Popen[bytes], file: Path, timeout_s: float, start: float) -> int | None:
    """Waits for the process. Returns its exit code, or None if it hung and was killed.

    A process blocked in the driver may survive.
    """
    seen, since, limit = _written(file), time.monotonic(), start
    while process.poll() is None:
        written = _written(file)
        if written != seen:
            seen, since, limit = written, time.monotonic(), timeout_s
        if time.monotonic() - since > limit:
            for child in descendants(process.pid):  # they would go on using the GPU beside the next process
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WAIT)
            return None
        time.sleep(PAUSE)
    return process.returncode


def descendants(process: int) -> list[int]:
    """Returns the numbers of all processes that a process and its children have started and that still run; none where
    the kernel does not list them."""
    found = list[int]()
    for listed in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, listed.read_text(encoding="ascii").split()):
                found += [child, *descendants(child)]
    return found


def _written(file: Path) -> int:
    return file.stat().st_mtime_ns if file.is_file() else 0
