"""Rounds on record: the lines of a request, and who gets them: a trace file, a listener."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from swiftspec.engine import Stats
from swiftspec.messages import Opening
from swiftspec.observe.lines import Record, given
from swiftspec.observe.trace_file import TraceFile
from swiftspec.runtime.pause import Cancelled

Listener = Callable[[Record], None]


class Recorder:
    """Gathers the lines of a request on rank 0. A round's line goes to the listener once the next round begins, when
    both lanes have spoken; to the file they all go when the request ends, as writing takes time.

    `listener` hears whole requests: one that is set or taken away while a request runs matters from the next one on.
    `drain` fetches what another process still has to say of a round that is over; whoever has such a process sets it.
    """

    def __init__(self, file: TraceFile | None = None) -> None:
        self.drain: Callable[[int], None] = lambda round_: None
        self.file = file
        self.listener: Listener | None = None
        self._hears: Listener | None = None  # of this request
        self._rounds: dict[int, Record] = {}
        self._held: list[Record] = []  # for the file
        self._request = 0

    @property
    def wanted(self) -> bool:
        """Whether the next request is to be on record."""
        return self.file is not None or self.listener is not None

    def begin(self, opening: Opening) -> None:
        """Another request."""
        self._request, self._hears = opening.request, self.listener
        self._rounds, self._held = {}, []
        begin = {"at": time.perf_counter(), "prompt": opening.prompt, "sampling": given(opening.sampling)}
        self._hand({"request": self._request, "begin": begin})

    def add(self, round_: int, **parts: Any) -> None:
        """More about a round of this request."""
        self._rounds.setdefault(round_, {"request": self._request, "round": round_}).update(parts)

    def draft(self, request: int, round_: int, lane: Record | Callable[[], Record]) -> None:
        """What the draft's lane says of a round, or what reads it (see `lines.opened`); nothing where that comes late,
        after its line or its request."""
        if request == self._request and round_ in self._rounds:
            self.add(round_, draft=lane)

    def lacks(self, round_: int) -> bool:
        """Whether the draft's lane has yet to speak of that round."""
        return round_ in self._rounds and "draft" not in self._rounds[round_]

    def release(self, before: float = float("inf")) -> None:
        """Lets the lines of the rounds before this one go. What was not verified has no line."""
        for round_ in [known for known in self._rounds if known < before]:
            line = self._rounds.pop(round_)
            if "tokens" in line:
                self._hand(line)

    def end(self, stats: Stats) -> None:
        """The request is over. Called while it is being left, so what ended it is the present exception."""
        self.release()
        error = sys.exc_info()[1]
        failed = isinstance(error, Exception) and not isinstance(error, Cancelled)
        reason = stats.finish_reason or ("error" if failed else "abort")
        end = {"at": time.perf_counter(), "reason": reason, "tokens": stats.tokens}
        self._hand({"request": self._request, "end": end})
        if self.file is not None:
            self.file.write(self._held)
            self._held = []

    def _hand(self, line: Record) -> None:
        if self._hears is not None:
            self._hears(line)
        if self.file is not None:
            self._held.append(line)
