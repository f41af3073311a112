"""A request of a batch, with its statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swiftspec.engine import Stats, StopCriteria, TokenChunk
from swiftspec.errors import UserError
from swiftspec.messages import RequestStart


@dataclass(slots=True, eq=False)
class BatchRequest:
    """A request of a batch with its statistics. Its times begin with its prefill: they do not include the wait before
    it."""

    start: RequestStart
    stop_criteria: StopCriteria
    stats: Stats
    error: UserError | None = None  # set if its finish reason is "error"
    started_at: float = 0.0  # start of its prefill, in seconds of `time.perf_counter`
    admitted_at: float = 0.0  # end of its prefill
    busy_before: tuple[float, float] = (0.0, 0.0)  # seconds in forwards of target and draft at `admitted_at`

    @property
    def number(self) -> int:
        return self.start.request

    def ended_chunk(self, reason: str) -> TokenChunk:
        """Returns the last chunk of a request that ends early: no tokens and the finish reason, which is also recorded
        in `stats`."""
        self.stats.finish_reason = reason
        return TokenChunk((), 0, reason)


NextRequest = Callable[[], BatchRequest | None]  # returns the next waiting request, or None
IsCancelled = Callable[[BatchRequest], bool]  # returns whether a request is to end early
