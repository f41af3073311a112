"""Rounds on record: what is noted of a request, and who gets it: a trace file, a listener."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from swiftspec.engine import Stats
from swiftspec.messages import Opening
from swiftspec.observe.round_records import Noted, Round
from swiftspec.observe.trace_file import TraceFile
from swiftspec.observe.trace_format import Record, given
from swiftspec.runtime.cancellation import Cancelled

Listener = Callable[[Sequence[Noted]], None]

TOGETHER = 0.03  # seconds of rounds that a listener hears at once: the eye is no faster


class Recorder:
    """Gathers what is noted of a request on rank 0. The listener hears several rounds at once, and each only when its
    draft has spoken or is too late; to the file they all go when the request ends, as writing takes time.

    `listener` hears whole requests: one that is set or taken away while a request runs matters from the next one on.
    `drain` fetches what another process still has to say of a round that is over; whoever has such a process sets it.
    """

    def __init__(self, file: TraceFile | None = None) -> None:
        self.drain: Callable[[int], None] = lambda round_: None
        self.file = file
        self.listener: Listener | None = None
        self._hears: Listener | None = None  # of this request
        self._noted: list[Noted] = []  # of this request, and not yet heard
        self._kept: list[Noted] = []  # for the file
        self._request, self._heard = 0, 0.0

    @property
    def wanted(self) -> bool:
        """Whether the next request is to be on record."""
        return self.file is not None or self.listener is not None

    def begin(self, opening: Opening) -> None:
        """Another request."""
        self._request, self._hears = opening.request, self.listener
        self._noted, self._kept = [], []
        begin = {"at": time.perf_counter(), "prompt": opening.prompt, "sampling": given(opening.sampling)}
        self.add({"request": self._request, "begin": begin})
        self._hand()

    def add(self, noted: Noted) -> None:
        """The next round of this request, once it is verified."""
        self._noted.append(noted)

    def draft(self, request: int, round_: int, lane: Callable[[], Record]) -> None:
        """What reads the draft's lane of a round (see `Round`); nothing where that comes late, after the next round or
        its request."""
        if request == self._request and (last := self._lacking(round_)) is not None:
            last.draft = lane

    def lacks(self, round_: int) -> bool:
        """Whether the draft's lane has yet to speak of that round, the last one verified."""
        return self._lacking(round_) is not None

    def hand(self) -> None:
        """Called when the next round is under way: lets the listener hear of those before, now and then."""
        if self._hears is not None and self._noted and time.perf_counter() - self._heard > TOGETHER:
            self._hand()

    def end(self, stats: Stats) -> None:
        """The request is over. Called while it is being left, so what ended it is the present exception."""
        last = self._lacking()
        if last is not None and last.asked:
            self.drain(last.proposal.round)
        error = sys.exc_info()[1]
        failed = isinstance(error, Exception) and not isinstance(error, Cancelled)
        reason = stats.finish_reason or ("error" if failed else "abort")
        end = {"at": time.perf_counter(), "reason": reason, "tokens": stats.tokens}
        self.add({"request": self._request, "end": end})
        self._hand()
        if self.file is not None:
            self.file.write(self._kept)
            self._kept = []

    def _lacking(self, round_: int | None = None) -> Round | None:
        """The last round verified, if it is that one, or any, and has no lane of the draft's."""
        last = self._noted[-1] if self._noted else None
        if isinstance(last, Round) and last.draft is None and round_ in (None, last.proposal.round):
            return last
        return None

    def _hand(self) -> None:
        noted, self._noted, self._heard = self._noted, [], time.perf_counter()
        if self._hears is not None:
            self._hears(noted)
        if self.file is not None:
            self._kept += noted
