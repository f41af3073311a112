"""Records the rounds of requests and delivers them to a trace file and to a subscriber."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from swiftspec.engine import Stats
from swiftspec.messages import RequestStart
from swiftspec.observe.round_records import RoundRecord, TraceEntry
from swiftspec.observe.trace_file import TraceFile
from swiftspec.observe.trace_format import Record, non_default_fields
from swiftspec.runtime.cancellation import Cancelled

TraceListener = Callable[[Sequence[TraceEntry]], None]

LISTENER_INTERVAL_S = 0.03  # of rounds per delivery to a listener; people do not see faster updates


class Recorder:
    """Collects the trace entries of a request on rank 0. The listener receives several rounds at a time, each once its
    draft timeline is complete or too late. All entries go to the file when the request ends, since writing takes time.

    `listener` receives whole requests: setting or removing it while a request runs takes effect with the next one.
    `drain` fetches the draft timelines that another process has yet to send for a finished round; the owner of such a
    process sets it.
    """

    def __init__(self, file: TraceFile | None = None) -> None:
        self.drain: Callable[[int], None] = lambda round_: None
        self.file = file
        self.listener: TraceListener | None = None
        self._active_listener: TraceListener | None = None  # of this request
        self._undelivered: list[TraceEntry] = []  # of this request, not delivered yet
        self._for_file: list[TraceEntry] = []  # for the file
        self._request, self._delivered_at = 0, 0.0

    @property
    def enabled(self) -> bool:
        """Whether the next request is to be recorded."""
        return self.file is not None or self.listener is not None

    def begin(self, start: RequestStart) -> None:
        """Starts a request."""
        self._request, self._active_listener = start.request, self.listener
        self._undelivered, self._for_file = [], []
        begin = {"at": time.perf_counter(), "prompt": start.prompt, "sampling": non_default_fields(start.sampling)}
        self.add({"request": self._request, "begin": begin})
        self._deliver()

    def add(self, entry: TraceEntry) -> None:
        """Adds the next round of this request, once it is verified."""
        self._undelivered.append(entry)

    def draft(self, request: int, round_: int, timeline: Callable[[], Record]) -> None:
        """Sets what reads the draft's timeline of a round (see `RoundRecord`). Ignored if it comes late, after the next
        round or the end of its request."""
        if request == self._request and (last := self._round_without_draft(round_)) is not None:
            last.draft = timeline

    def awaits_draft(self, round_: int) -> bool:
        """Whether the draft's timeline of that round, the last one verified, is missing."""
        return self._round_without_draft(round_) is not None

    def deliver(self) -> None:
        """Delivers earlier rounds to the listener, at most once per LISTENER_INTERVAL_S; called during a round."""
        if (
            self._active_listener is not None
            and self._undelivered
            and time.perf_counter() - self._delivered_at > LISTENER_INTERVAL_S
        ):
            self._deliver()

    def end(self, stats: Stats) -> None:
        """Ends the request. Called while its context is being left, so the exception that ended it is the current
        one."""
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
        """The last round verified, if it is round `round_` (None: any) and has no draft timeline."""
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
