"""Writes and reads trace files (`--trace`), which have one line of JSON per entry."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from swiftspec import file_io
from swiftspec.errors import UserError
from swiftspec.observe.trace_format import TRACE_VERSION, Record, TokenText, TokenTexts, TraceEntry, to_json, to_record

MAX_LINE_BYTES = 32 << 20  # limit for reading; the longest line contains a prompt and the texts of its tokens


class TraceFile:
    """Trace file that is open for writing; it may be a named pipe.

    The constructor raises UserError if the file cannot be opened or a pipe has no reader. A later write error does not
    affect requests: it sets `error`, and all further entries are dropped.

    `error`: message of the first write error, or None.
    `token_text`: returns the text of a token id. If set, each line has the fields of `text_fields` for the tokens that
    no earlier line contains.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: str | None = None
        self.token_text: Callable[[int], TokenText] | None = None
        self._texts = TokenTexts()
        try:
            self._file = os.fdopen(_opened(path), "w", encoding="utf-8")
        except OSError as error:
            alone = error.errno == errno.ENXIO and path.is_fifo()
            why = "the pipe has no reader; start the reader first" if alone else error.strerror
            raise UserError(f"--trace {path} cannot be written: {why}") from None

    def write(self, entries: Iterable[TraceEntry]) -> None:
        """Writes the trace lines of the entries and flushes the file."""
        for line in map(to_record, entries):
            texts = {} if self.token_text is None else self._texts.new(line, self.token_text)
            self._try(self._file.write, json.dumps(line | texts, default=to_json) + "\n")
        self._try(self._file.flush)

    def close(self) -> None:
        """Closes the file."""
        self._try(self._file.close)

    def _try(self, act: Callable[..., object], *values: Any) -> None:
        if self.error is not None:
            return
        try:
            act(*values)
        except OSError as error:
            self.error = error.strerror or str(error)
            with suppress(OSError):  # closing tries to write the rest again
                self._file.close()


def read_trace(path: Path, max_bytes: int) -> Iterator[tuple[str, Record]]:
    """Yields (name for error messages, content) of each line of a trace file, the header first. Skips a truncated last
    line. Raises UserError if the file is larger than `max_bytes`, is not a trace, or has an invalid line."""
    no_trace = UserError(f"{path} is not a trace of this version; record one with `serve --trace {path.name}`")
    number, bad = 0, None
    for number, line in enumerate(file_io.read_lines(path, max_bytes=max_bytes, max_line_bytes=MAX_LINE_BYTES), 1):
        if bad is not None:
            raise bad
        name = f"{path}, line {number},"
        try:
            data = file_io.parse_json(file_io.decode_utf8(line, name), name)
        except UserError as error:
            bad = UserError(f"{error}: was it made with --trace?")
            continue
        if number == 1 and (not isinstance(data, dict) or data.get("swiftspec_trace") != TRACE_VERSION):
            raise no_trace
        if not isinstance(data, dict):
            raise UserError(f"{name} is damaged: it is not a JSON object")
        yield name, data
    if number == 0 or (number == 1 and bad is not None):
        raise no_trace


def _opened(path: Path) -> int:
    """Opens a file for writing and returns its descriptor. Raises OSError (ENXIO) if a pipe has no reader."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    os.set_blocking(descriptor, True)
    return descriptor
