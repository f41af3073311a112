"""Lines of a trace on their way from rank 0's decode loop to the front end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from swiftspec.observe.lines import Record, opened, plain, tokens_in
from swiftspec.serve.http import frames

TOGETHER = 0.015  # seconds of rounds that go at once: waking whoever writes and reads them is most of what they cost


class Lines:
    """Hears lines. Several go together to `send`, which is handed what makes the frame: where it is sent from a thread,
    the decode loop does not wait for that."""

    def __init__(self, send: Callable[[Callable[[], frames.Frame]], None]) -> None:
        self._send, self._held, self._sent = send, list[Record](), 0.0

    def __call__(self, line: Record) -> None:
        """The next line."""
        self._held.append(line)
        now = time.perf_counter()
        if now - self._sent > TOGETHER or "round" not in line:
            held, self._held, self._sent = self._held, [], now
            self._send(partial(as_frame, held))


def as_frame(lines: Sequence[Record]) -> frames.Events:
    """Lines as they travel."""
    made: list[frames.Event] = []
    for line in map(opened, lines):
        kind = next(kind for kind in ("begin", "end", "round") if kind in line)
        made.append(frames.Event(kind, msgspec.json.encode(line, enc_hook=plain), sorted(tokens_in(line))))
    return frames.Events(made)
