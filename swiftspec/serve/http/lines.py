"""Lines of a trace on their way from rank 0's decode loop to the front end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from swiftspec.observe.lines import Record, opened, plain, tokens_in
from swiftspec.observe.recorder import Note
from swiftspec.serve.http import frames


class Lines:
    """Listens, and has lines made where they are sent: `send` is handed what makes the frame, and calls it beside the
    decode loop."""

    def __init__(self, send: Callable[[Callable[[], frames.Frame]], None]) -> None:
        self._send, self._held = send, list[Record]()

    def __call__(self, line: Record) -> None:
        """The next line."""
        self._held.append(line)

    def beside(self, note: Note) -> None:
        """Has it noted there, in order; the lines that come of it are a frame."""
        self._send(partial(self._frame, note))

    def _frame(self, note: Note) -> frames.Events:
        note()
        held, self._held = self._held, []
        return as_frame(held)


def as_frame(lines: Sequence[Record]) -> frames.Events:
    """Lines as they travel."""
    made: list[frames.Event] = []
    for line in map(opened, lines):
        kind = next(kind for kind in ("begin", "end", "round") if kind in line)
        made.append(frames.Event(kind, msgspec.json.encode(line, enc_hook=plain), sorted(tokens_in(line))))
    return frames.Events(made)
