"""A process on a pseudo-terminal, with typed input and parsed output."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

import pytest


class Terminal:
    """Python with these arguments in the repository's root, on a terminal of 40 x 200."""

    def __init__(self, argv: Sequence[str], **environment: str) -> None:
        self.output = ""
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.pid, self._fd = pty.fork()
        if self.pid == 0:  # the child
            os.chdir(Path(__file__).resolve().parents[2])
            os.execve(sys.executable, [sys.executable, *argv], {**os.environ, **environment})
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))

    def send(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def until(self, pattern: str, seconds: float = 60) -> str:
        """Reads until the pattern matches and returns the output since the last call. Of escape sequences only the end
        of a typed line remains, as <sent>."""
        deadline = time.monotonic() + seconds
        while (found := re.search(pattern, self.output)) is None:
            if time.monotonic() > deadline or not self._read():
                pytest.fail(f"no {pattern!r} in {self.output!r}")
        matched, self.output = self.output[: found.end()], self.output[found.end() :]
        return matched

    def leave(self) -> int:
        """Waits for the exit code."""
        while self._read():
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self) -> bool:
        if not select.select([self._fd], [], [], 0.2)[0]:
            return True
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # raised by Linux if the other side is closed
            return False
        if b"\x1b[6n" in data:  # query of the cursor position
            os.write(self._fd, b"\x1b[1;1R")
        self.output = (self.output + self._decode(data)).replace("\x1b[?2004l", "<sent>")
        self.output = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.output)
        return bool(data)
