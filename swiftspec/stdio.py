"""Standard output and standard error of a command. A failed write to standard output ends the command with a one-line
error; a failed write to standard error is ignored."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swiftspec.errors import UserError


class OutputLost(UserError):
    """Standard output cannot be written."""


class _AnswerStream(io.TextIOWrapper):
    """Standard output. The first failed write raises BrokenPipeError or OutputLost and redirects the file descriptor to
    /dev/null, so that buffered text causes no second error, not even at the interpreter's exit."""

    failure: Exception | None = None

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise self._fail(error) from None

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise self._fail(error) from None

    def _fail(self, error: OSError) -> Exception:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
        broken = isinstance(error, BrokenPipeError)
        self.failure = error if broken else OutputLost(f"standard output cannot be written: {error.strerror or error}")
        return self.failure


class _MessageStream(io.TextIOWrapper):
    """Standard error; failed writes are ignored."""

    def write(self, text: str, /) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


class CommandStreams:
    """Output streams of a running command."""

    def __init__(self, answers: _AnswerStream | None) -> None:
        self._answers = answers

    def check(self) -> None:
        """Raises UserError if standard output is closed."""
        if sys.stdout is None:
            raise UserError("standard output is closed: redirect it to a file or to /dev/null")

    def flush(self) -> None:
        """Flushes standard output. Raises OutputLost or BrokenPipeError if this or an earlier write failed."""
        if sys.stdout is not None:
            sys.stdout.flush()
        if self._answers is not None and self._answers.failure is not None:
            raise self._answers.failure


@contextmanager
def command_streams(first: bool) -> Iterator[CommandStreams]:
    """Installs the output streams of a command and restores the previous ones at the end. Streams that are not the
    process's own, such as those of a test, are left unchanged. `first`: whether this is rank 0; the standard output of
    other ranks is discarded."""
    before = sys.stdout, sys.stderr
    for closed in (0, 1, 2):  # if one stays closed, the next opened file gets its number and receives library messages
        try:
            os.fstat(closed)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the kernel assigns the lowest free number, which is `closed`
    answers = messages = None
    if sys.stderr is sys.__stderr__:
        encoding = "utf-8" if sys.stderr is None else sys.stderr.encoding
        messages = sys.stderr = _MessageStream(_open_fd(2), encoding, "replace", line_buffering=True)
    if not first:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    elif sys.stdout is not None and sys.stdout is sys.__stdout__:
        original = sys.stdout
        answers = sys.stdout = _AnswerStream(
            _open_fd(1),
            original.encoding,
            "replace",  # an unsupported character becomes ?
            line_buffering=bool(original.line_buffering),
            write_through=bool(getattr(original, "write_through", False)),
        )
    try:
        yield CommandStreams(answers)
    finally:
        if messages is not None:
            messages.flush()
        sys.stdout, sys.stderr = before


def _open_fd(number: int) -> io.BufferedWriter:
    os.set_blocking(number, True)  # an inherited pipe may be non-blocking, and then writes fail when it is full
    return io.BufferedWriter(io.FileIO(number, "w", closefd=False))


def warn(text: str) -> None:
    """Prints a warning on standard error, even if progress and notes are not shown."""
    print(f"swiftspec: warning: {text}", file=sys.stderr, flush=True)
