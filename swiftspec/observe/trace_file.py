"""The file of `--trace`: a line of JSON for each thing on record."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from swiftspec.errors import UserError
from swiftspec.observe.lines import Record, Texts, opened, plain


class TraceFile:
    """Raises UserError on a file that cannot be opened, and on a pipe without a reader. A file that takes no more later
    costs nobody an answer: what is still to be written is dropped, and `lost` says why.

    `spell` makes text of a token; where there is one, each line has `texts` of the tokens that are new in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost: str | None = None
        self.spell: Callable[[int], str] | None = None
        self._texts = Texts()
        try:
            self._file = os.fdopen(_opened(path), "w", encoding="utf-8")
        except OSError as error:
            alone = error.errno == errno.ENXIO and path.is_fifo()
            why = "nobody reads this pipe yet, start its reader first" if alone else error.strerror
            raise UserError(f"--trace {path} cannot be written: {why}") from None

    def write(self, lines: Iterable[Record]) -> None:
        """Writes these lines, and all that was written before."""
        for line in map(opened, lines):
            texts = {} if self.spell is None else self._texts.new(line, self.spell)
            self._try(self._file.write, json.dumps(line | texts, default=plain) + "\n")
        self._try(self._file.flush)

    def close(self) -> None:
        """Closes the file."""
        self._try(self._file.close)

    def _try(self, act: Callable[..., object], *values: Any) -> None:
        if self.lost is not None:
            return
        try:
            act(*values)
        except OSError as error:
            self.lost = error.strerror or str(error)
            with suppress(OSError):  # it tries to write the rest once more
                self._file.close()


def _opened(path: Path) -> int:
    """Opens a file to write, without waiting for the reader of a pipe."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    os.set_blocking(descriptor, True)
    return descriptor
