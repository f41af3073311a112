"""What standard output and standard error are for a command, however it was started. The answer goes to the first: what
cannot be written there ends the run, with one line. Messages go to the second, and are never what a run fails by."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swiftspec.errors import UserError


class OutputLost(UserError):
    """Standard output takes nothing any more."""


class _AnswerStream(io.TextIOWrapper):
    """Standard output. The first write that fails says why; after it the file is nowhere, so that what is held back
    troubles nobody, not even the interpreter when it ends."""

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
    """Standard error, on which all goes well."""

    def write(self, text: str, /) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


class CommandStreams:
    """The streams of a running command."""

    def __init__(self, answers: _AnswerStream | None) -> None:
        self._answers = answers

    def check(self) -> None:
        """Raises UserError where there is no standard output."""
        if sys.stdout is None:
            raise UserError("standard output is closed: there is nowhere to print an answer")

    def flush(self) -> None:
        """Writes what is held back. Raises OutputLost or BrokenPipeError if that, or a write before, did not work."""
        if sys.stdout is not None:
            sys.stdout.flush()
        if self._answers is not None and self._answers.failure is not None:
            raise self._answers.failure


@contextmanager
def command_streams(first: bool) -> Iterator[CommandStreams]:
    """The streams as a command has them; those before come back afterwards. Streams that are not the process's own,
    such as a test's, stay as they are. `first`: this rank prints; the output of others goes nowhere."""
    before = sys.stdout, sys.stderr
    for closed in (0, 1, 2):  # else a file that is opened later would become what a library writes its messages to
        try:
            os.fstat(closed)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    answers = messages = None
    if sys.stderr is sys.__stderr__:
        encoding = "utf-8" if sys.stderr is None else sys.stderr.encoding
        messages = sys.stderr = _MessageStream(_open_fd(2), encoding, "replace", line_buffering=True)
    if not first:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    elif sys.stdout is not None and sys.stdout is sys.__stdout__:
        original = sys.stdout
        answers = sys.stdout = _AnswerStream(
            _open_fd(1), original.encoding, "replace",  # a terminal that lacks a character shows ? for it
            line_buffering=bool(original.line_buffering), write_through=bool(getattr(original, 'write_through', False)),
        )  # fmt: skip
    try:
        yield CommandStreams(answers)
    finally:
        if messages is not None:
            messages.flush()
        sys.stdout, sys.stderr = before


def _open_fd(number: int) -> io.BufferedWriter:
    os.set_blocking(number, True)  # a pipe may come otherwise, and then it has no room now and then
    return io.BufferedWriter(io.FileIO(number, "w", closefd=False))


def warn(text: str) -> None:
    """A line of warning, even where phases and notes are not shown."""
    print(f"swiftspec: warning: {text}", file=sys.stderr, flush=True)
