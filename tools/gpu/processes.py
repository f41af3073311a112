"""Runs a step as a process. One that fails, hangs or leaves child processes behind does not affect the others."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.gpu.steps import ROOT, SCRATCH, SECONDS, Step, slug

SKIPPED = 5  # exit code of pytest if it ran no tests, and of benchmarks that lack what they need
TAIL, WHOLE_TAIL = 600, 6000  # characters of output retained from a successful step, and from any other
LAST_WORDS = 4.0  # seconds that an interrupted process has to report its state
LAST_WAIT = 5.0  # timeout in seconds after a kill; a process blocked in the driver may survive it
MARGIN = 12.0  # seconds for ending a step
OUT_OF_TIME = "out of time"


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    state: str  # ok, failed, OUT_OF_TIME, or of a step that has not run (queue.py)
    seconds: float
    tail: str


def run(step: Step, limit: float) -> Outcome:
    """Runs a step for at most `limit` seconds, then ends it and all its child processes."""
    began = time.monotonic()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background shell; steps inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))  # cmake and ninja
    environment = {**os.environ, "PATH": path, "SWIFTSPEC_CUDA": "1", "PYTHONUNBUFFERED": "1", **step.environment}
    command = [part.replace(SECONDS, f"{max(limit - MARGIN, 1.0):.0f}") for part in step.command]
    log = SCRATCH / f"{slug(step.name)}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # a file, because a pipe stays open as long as any child process has it open
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            return Outcome(step.name, "failed", 0.0, str(error))
        try:
            state = {0: "ok", SKIPPED: "nothing to run"}.get(process.wait(limit), "failed")
        except subprocess.TimeoutExpired:
            state = OUT_OF_TIME
            interrupt(process)
        finally:
            end(process)
    said = log.read_text(encoding="utf-8", errors="replace")
    last = said.strip().rpartition("\n")[2]
    if state == "ok" and re.search(r"\d skipped\b.* in \d", last) and " passed" not in last:
        state = "nothing to run"
    kept = TAIL if state == "ok" else WHOLE_TAIL
    return Outcome(step.name, state, time.monotonic() - began, said[-kept:])


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Interrupts a process like Ctrl-C, on which pytest reports the failures so far. Waits for a limited time."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LAST_WORDS)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and its children, and waits for a limited time."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LAST_WAIT)


def without_paths(text: str) -> str:
    """Replaces the paths of this machine's checkout and interpreter, since results may be published."""
    return text.replace(sys.executable, "python").replace(f"{ROOT}/", "").replace(str(ROOT), ".")


def pack_logs(file: Path) -> None:
    """Packs all logs, samples and traces into one file, for environments that return only a few files."""
    with tarfile.open(file, "w:gz") as packed:
        for log in sorted([*SCRATCH.glob("*.log"), *SCRATCH.glob("*.jsonl"), *SCRATCH.glob("trace.json")]):
            packed.add(log, log.name)


def read(file: Path | None) -> dict[str, Any] | None:
    """Reads a JSON object. Returns None if the file is missing or invalid."""
    try:
        return None if file is None else json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
