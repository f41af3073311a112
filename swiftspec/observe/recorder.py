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
Note = Callable[[], None]  # notes something that has happened

TOGETHER = 0.015  # seconds of rounds that are noted at once


def at_once(note: Note, last: bool = False) -> None:
    """Notes it."""
    note()


class Recorder:
    """Makes the lines of a request on rank 0. In the midst of a round there is no time for that: what has happened goes
    on a tape (`put`), and is noted several rounds at a time.

    A round's line goes to the listener once the next round begins, when both lanes have spoken; to the file they all go
    when the request ends, as writing takes time. `listener` hears whole requests: one that is set or taken away while a
    request runs matters from the next one on. `beside` does what it is handed, in order, beside the decode loop: where
    there is one, and no file, lines are made there. `drain` fetches what another process still has to say of a round
    that is over; whoever has such a process sets it.
    """

    def __init__(self, file: TraceFile | None = None) -> None:
        self.drain: Callable[[int], None] = lambda round_: None
        self.file = file
        self.listener: Listener | None = None
        self.beside: Callable[[Note], None] | None = None
        # in the decode loop
        self._tape: list[Note] = []
        self._noted = 0.0  # when, last
        self._live, self._act = False, self.beside  # whether this request has a listener; what acts on its tape
        self._open, self._heard = 0, (0, -1)  # the request; request and round that another process has told of last
        # where notes are made
        self._hears: Listener | None = None  # of this request
        self._rounds: dict[int, Record] = {}
        self._held: list[Record] = []  # for the file
        self._request = 0

    # in the decode loop

    def begins(self) -> bool:
        """A request opens, and whoever listens by now hears all of it. Whether it is to be on record."""
        self._live = self.listener is not None
        self._act = self.beside if self.file is None else None
        return self._live or self.file is not None

    def opens(self, opening: Opening) -> Listener | None:
        """Its number, by which records of another process are told apart; and who listens to it."""
        self._open = opening.request
        return self.listener

    def put(self, note: Note, last: bool = False) -> None:
        """What has happened, to be noted soon: with the `last` of a request at the latest."""
        self._tape.append(note)
        now = time.perf_counter()
        if last or (self._live and now - self._noted > TOGETHER):
            tape, self._tape, self._noted = self._tape, [], now
            (self._act or at_once)(lambda: play(tape))

    def draft(self, request: int, round_: int, lane: Callable[[], Record]) -> None:
        """What reads a draft's record that has come from another process (see `lines.opened`)."""
        self._heard = request, round_
        self.put(lambda: self.lane(request, round_, lane))

    def lacks(self, round_: int) -> bool:
        """Whether that process has yet to speak of that round."""
        return self._heard != (self._open, round_)

    # where notes are made

    def begin(self, at: float, opening: Opening, listener: Listener | None) -> None:
        """Another request."""
        self._request, self._hears = opening.request, listener
        self._rounds, self._held = {}, []
        self._hand(begin={"at": at, "prompt": opening.prompt, "sampling": given(opening.sampling)})

    def add(self, round_: int, **parts: Any) -> None:
        """More about a round of this request."""
        self._rounds.setdefault(round_, {"request": self._request, "round": round_}).update(parts)

    def lane(self, request: int, round_: int, lane: Record | Callable[[], Record]) -> None:
        """What the draft's lane says of a round, or what reads it; nothing where that comes late, after its line or its
        request."""
        if request == self._request and round_ in self._rounds:
            self.add(round_, draft=lane)

    def release(self, before: float = float("inf")) -> None:
        """Lets the lines of the rounds before this one go. What was not verified has no line."""
        for round_ in [known for known in self._rounds if known < before]:
            line = self._rounds.pop(round_)
            if "tokens" in line:
                self._hand(**line)

    def end(self, at: float, reason: str, tokens: int) -> None:
        """The request is over; see `reason_of`."""
        self.release()
        self._hand(end={"at": at, "reason": reason, "tokens": tokens})
        if self.file is not None:
            self.file.write(self._held)
            self._held = []

    def _hand(self, **parts: Any) -> None:
        line = {"request": self._request, **parts}
        if self._hears is not None:
            self._hears(line)
        if self.file is not None:
            self._held.append(line)


def play(tape: list[Note]) -> None:
    """Notes all of it."""
    for note in tape:
        note()


def reason_of(stats: Stats) -> str:
    """Why a request ends. Asked while it is being left, so what ended it is the present exception."""
    error = sys.exc_info()[1]
    failed = isinstance(error, Exception) and not isinstance(error, Cancelled)
    return stats.finish_reason or ("error" if failed else "abort")
