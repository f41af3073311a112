"""Runs short generated programs, each in its own process, with limits on time, memory and files.

The limits contain accidents: no imports, no files, no second process, one second of CPU time. They do not contain a
program that tries to escape.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from types import TracebackType
from typing import Any

SECONDS, MEMORY = 1, 1 << 30
NEVER = {"open", "exec", "eval", "compile", "__import__", "input", "breakpoint", "help", "exit", "quit"}


class Sandbox:
    """Runner of programs in child processes, with cached results. Must be closed after use."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._known = dict[str, bool]()

    def passes(self, program: str) -> bool:
        """Returns whether a program ends without an error."""
        if program not in self._known:
            stdin, stdout = self._process.stdin, self._process.stdout
            assert stdin is not None and stdout is not None
            stdin.write(json.dumps(program) + "\n")
            stdin.flush()
            self._known[program] = json.loads(stdout.readline())
        return self._known[program]

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate()


def _run(program: str) -> None:
    """Runs a program under the limits in this process, then exits with 0, or with 1 after an error. Never returns."""
    with contextlib.suppress(BaseException):
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nowhere, number)
        for what, most in (
            (resource.RLIMIT_CPU, SECONDS), (resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_NOFILE, 0), (resource.RLIMIT_CORE, 0),
        ):  # fmt: skip
            resource.setrlimit(what, (most, most))
        signal.alarm(2 * SECONDS)
        known: dict[str, Any] = {name: value for name, value in vars(builtins).items() if name not in NEVER}
        exec(program, {"__builtins__": known, "__name__": "program"})
        os._exit(0)
    os._exit(1)


def main() -> None:
    """Reads one program per line as JSON and prints whether each ended without an error."""
    for line in sys.stdin:
        program = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(program)
        _, status = os.waitpid(child, 0)
        print(json.dumps(status == 0), flush=True)


if __name__ == "__main__":
    main()
