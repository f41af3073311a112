"""Collects the trace entries of requests for a trace file and a listener."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from swiftspec.engine import Stats
from swiftspec.messages import RequestStart
from swiftspec.observe.trace_file import TraceFile
from swiftspec.observe.trace_format import Record, RoundRecord, TraceEntry, non_default_fields
from swiftspec.runtime.cancellation import Cancelled

TraceListener = Callable[[Sequence[TraceEntry]], None]

LISTENER_INTERVAL_S = 0.03  # shortest time between two deliveries during a request; people do not see faster updates


class Recorder:
    """Collects the trace entries of the running request on rank 0.

    The listener receives several rounds at a time, a round after its draft timeline has arrived or is too late. The
    file receives all entries when the request ends, because writing takes time.

    `listener`: receives whole requests, so a change during a request takes effect with the next one. None: no listener.
    `drain`: called at the end of a request if the draft's timeline of its last round is missing, with the number of the
    round; receives it from the draft's process. `RemoteDrafter` sets this function.
    """

    def __init__(self, file: TraceFile | None = None, beside: Recorder | None = None) -> None:
        """`beside`: recorder of a request that runs at the same time, whose file and listener this one shares."""
        self.drain: Callable[[int], None] = lambda round_: None
        self.file = file if beside is None else beside.file
        self._listeners: list[TraceListener | None] = [None] if beside is None else beside._listeners
        self._active_listener: TraceListener | None = None  # listener of the running request
        self._undelivered: list[TraceEntry] = []  # entries of the running request that are not delivered yet
        self._for_file: list[TraceEntry] = []  # delivered entries that are not written to the file yet
        self._request, self._delivered_at = 0, 0.0

    @property
    def listener(self) -> TraceListener | None:
        return self._listeners[0]

    @listener.setter
    def listener(self, listener: TraceListener | None) -> None:
        self._listeners[0] = listener

    @property
    def enabled(self) -> bool:
        """Whether the next request will be recorded: there is a trace file or a listener."""
        return self.file is not None or self.listener is not None

    def begin(self, start: RequestStart) -> None:
        """Starts the record of a request and delivers its first entry."""
        self._request, self._active_listener = start.request, self.listener
        self._undelivered, self._for_file = [], []
        begin = {"at": time.perf_counter(), "prompt": start.prompt, "sampling": non_default_fields(start.sampling)}
        self.add({"request": self._request, "begin": begin})
        self._deliver()

    def add(self, entry: TraceEntry) -> None:
        """Adds the next entry of the running request. A round is added after it is verified."""
        self._undelivered.append(entry)

    def draft(self, request: int, round_: int, timeline: Callable[[], Record]) -> None:
        """Sets the draft's timeline of a round, as a function that decodes it (see `RoundRecord.draft`). Ignored if the
        round is no longer the last one, has been delivered, or belongs to another request."""
        if request == self._request and (last := self._round_without_draft(round_)) is not None:
            last.draft = timeline

    def awaits_draft(self, round_: int) -> bool:
        """Returns whether `round_` is the last verified round and its draft timeline has not arrived."""
        return self._round_without_draft(round_) is not None

    def deliver(self) -> None:
        """Delivers the entries so far to the listener, at most once per LISTENER_INTERVAL_S. Called in every round."""
        if (
            self._active_listener is not None
            and self._undelivered
            and time.perf_counter() - self._delivered_at > LISTENER_INTERVAL_S
        ):
            self._deliver()

    def end(self, stats: Stats) -> None:
        """Ends the record of the request and writes it to the file. Must be called while the exception that ended the
        request, if any, is being handled: the recorded reason depends on it."""
        last = self._round_without_draft()
        if last is not None and last.asked:
            self.drain(last.proposal.round)
        error = sys.exc_info()[1]
        failed = isinstance(error, Exception) and not isinstance(error, Cancelled)
        reason = stats.finish_reason or ("error" if failed else "abort")
        end = {"at": time.perf_counter(), "reason": reason, "tokens": stats.tokens}
        self.add({"request": self._request, "end": end})
        self._deliver()
        if self.file is not None:
            self.file.write(self._for_file)
            self._for_file = []

    def _round_without_draft(self, round_: int | None = None) -> RoundRecord | None:
        """Returns the last entry if it is a round without draft timeline and has number `round_` (None: any number).
        Returns None otherwise."""
        last = self._undelivered[-1] if self._undelivered else None
        if isinstance(last, RoundRecord) and last.draft is None and round_ in (None, last.proposal.round):
            return last
        return None

    def _deliver(self) -> None:
        entry, self._undelivered, self._delivered_at = self._undelivered, [], time.perf_counter()
        if self._active_listener is not None:
            self._active_listener(entry)
        if self.file is not None:
            self._for_file += entry
