"""Runs short programs that a model wrote, each in a process of its own, with limits on time, memory and files.

It keeps accidents in bounds: no import, no file, no second process, a second of computing. It is no wall against
somebody who wants out of it.
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
    """Close it. What it has run before is not run again."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._known = dict[str, bool]()

    def passes(self, program: str) -> bool:
        """Whether a program comes to its end without an error."""
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
    """In the child: never comes back."""
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
    """A program a line, as JSON; says whether each has come to its end."""
    for line in sys.stdin:
        program = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(program)
        _, status = os.waitpid(child, 0)
        print(json.dumps(status == 0), flush=True)


if __name__ == "__main__":
    main()
