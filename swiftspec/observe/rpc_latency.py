"""Latency of RPCs with workers, and the offset of a worker's clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

MAX_BUFFERED_RPCS = 4096  # RPCs in the log; the oldest ones are dropped
MAX_CLOCK_DRIFT = 1e-4  # assumed bound on the drift between two clocks, in seconds per second


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Offset of a worker's clock.

    `ahead`: nanoseconds that it is ahead of this machine's clock.
    `error`: error bound of `ahead` in nanoseconds.
    """

    ahead: int
    error: int

    @staticmethod
    def of(asked: int, clock: int, came: int) -> ClockOffset:
        """Returns the offset of a clock that read `clock` at a moment between the local times `asked` and `came`."""
        return ClockOffset(clock - (asked + came) // 2, (came - asked + 1) // 2)

    def aged(self, passed: int) -> ClockOffset:
        """Returns the offset `passed` nanoseconds later: the same, with an error bound that includes clock drift."""
        return replace(self, error=self.error + int(MAX_CLOCK_DRIFT * passed))

    def excludes(self, other: ClockOffset) -> bool:
        """Returns whether the offsets differ by more than the sum of their error bounds, i.e. a clock was set."""
        return abs(self.ahead - other.ahead) > self.error + other.error

    def to_local(self, clock: int) -> int:
        """Converts a time of the worker's clock to this machine's clock, in nanoseconds."""
        return clock - self.ahead


@dataclass(frozen=True, slots=True)
class RpcRecord:
    """One RPC: a request to a worker and its response, or a tree delta from the worker. Times are in nanoseconds.

    `asked`, `came`: Unix times on this machine when the request was sent and the response received. For a tree delta
    `asked` is when the previous result was sent.
    `span`: the worker's span id.
    `began`: start of the worker's part, on the worker's clock.
    `wall`, `queue`, `model`: duration of the worker's part, of waiting for other sessions, and of forwards.
    `clock`: offset of the worker's clock.
    """

    side: str  # "target" or "draft"
    round: int  # -1: the start of a request
    asked: int
    came: int
    span: int
    began: int
    wall: int
    queue: int
    model: int
    clock: ClockOffset | None = None

    @property
    def offset(self) -> ClockOffset:
        """Clock offset estimated from this RPC alone: `began` is between `asked` and `came - wall`."""
        return ClockOffset.of(self.asked, self.began, max(self.came - self.wall, self.asked))

    def line(self) -> dict[str, Any]:
        """Returns the entry of the RPC in a trace line."""
        return {**asdict(self), "span": f"{self.span:016x}"}


@dataclass(slots=True)
class RpcLog:
    """Log of RPCs with workers. `on_record`: called with each RPC."""

    on_record: Callable[[RpcRecord], None] | None = None
    _known: deque[RpcRecord] = field(default_factory=lambda: deque(maxlen=MAX_BUFFERED_RPCS))
    _clocks: dict[str, tuple[bytes, int, ClockOffset]] = field(
        default_factory=dict
    )  # by side: session, `RpcRecord.came` of the RPC that gave the offset, offset

    def add(self, rpc: RpcRecord, session: bytes) -> None:
        """Adds an RPC and sets its clock offset. `session`: id of the worker session that answered."""
        rpc = replace(rpc, clock=self._clock(rpc, session))
        self._known.append(rpc)
        if self.on_record is not None:
            self.on_record(rpc)

    def drain(self) -> list[RpcRecord]:
        """Returns the RPCs since the last call and removes them."""
        known = [*self._known]
        self._known.clear()
        return known

    def _clock(self, rpc: RpcRecord, session: bytes) -> ClockOffset:
        """Returns the offset of the worker's clock with the smallest error bound: that of this RPC or of an earlier one
        of the same session. Another session may be on another machine."""
        before, read, offset = self._clocks.get(rpc.side, (b"", 0, rpc.offset))
        if before == session:
            offset, new = offset.aged(rpc.came - read), rpc.offset
            if offset.error < new.error and not offset.excludes(new):
                return offset
        self._clocks[rpc.side] = session, rpc.came, rpc.offset
        return rpc.offset


def clock_reading() -> dict[str, Any]:
    """Returns field `clocks` of the first line of a trace: the current time on two clocks of this machine, so that the
    `perf_counter` times of rounds can be related to the Unix times of RPCs."""
    return {"clocks": {"at": time.perf_counter(), "unix_ns": time.time_ns()}}
