"""RPCs with workers: durations, and the offset between the clocks of the worker and this machine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

from swiftspec.observe.trace_format import Record

MAX_BUFFERED_RPCS = 4096  # older ones are dropped
MAX_CLOCK_DRIFT = 1e-4  # seconds per second


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Nanoseconds by which a worker's clock is ahead of this machine's, and the error bound of that."""

    ahead: int
    error: int

    @staticmethod
    def of(asked: int, clock: int, came: int) -> ClockOffset:
        """The offset of a clock that was read between two local times, most likely halfway."""
        return ClockOffset(clock - (asked + came) // 2, (came - asked + 1) // 2)

    def aged(self, passed: int) -> ClockOffset:
        """The same offset `passed` nanoseconds later, with a larger error."""
        return replace(self, error=self.error + int(MAX_CLOCK_DRIFT * passed))

    def excludes(self, other: ClockOffset) -> bool:
        """Whether two offsets contradict each other: then a clock was set."""
        return abs(self.ahead - other.ahead) > self.error + other.error

    def to_local(self, clock: int) -> int:
        """Converts a time of the worker's clock to this machine's."""
        return clock - self.ahead


@dataclass(frozen=True, slots=True)
class RpcRecord:
    """One RPC: a request to a worker and its response, or a tree delta from the worker. Times in nanoseconds.

    `asked`, `came`: sent and received, by this machine's clock since 1970.
    `began`: by the worker's clock, which `clock` relates to this machine's.
    `span`: the worker's identifier for it.
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
        """The clock offset according to this RPC alone: the worker's part lies within it."""
        return ClockOffset.of(self.asked, self.began, max(self.came - self.wall, self.asked))

    def line(self) -> Record:
        """Its entry in a trace line."""
        return {**asdict(self), "span": f"{self.span:016x}"}


@dataclass(slots=True)
class RpcLog:
    """The RPCs of the running request. `on_record` is called with each."""

    on_record: Callable[[RpcRecord], None] | None = None
    _known: deque[RpcRecord] = field(default_factory=lambda: deque(maxlen=MAX_BUFFERED_RPCS))
    _clocks: dict[str, tuple[bytes, int, ClockOffset]] = field(
        default_factory=dict
    )  # by side: session, time of the reading, offset

    def add(self, rpc: RpcRecord, session: bytes) -> None:
        """Adds an RPC of that session of the worker."""
        rpc = replace(rpc, clock=self._clock(rpc, session))
        self._known.append(rpc)
        if self.on_record is not None:
            self.on_record(rpc)

    def drain(self) -> list[RpcRecord]:
        """Returns and removes the RPCs since the last call."""
        known = [*self._known]
        self._known.clear()
        return known

    def _clock(self, rpc: RpcRecord, session: bytes) -> ClockOffset:
        """The offset of the worker's clock, from the RPC of this session that bounds it best; another session may be on
        another machine."""
        before, read, offset = self._clocks.get(rpc.side, (b"", 0, rpc.offset))
        if before == session:
            offset, new = offset.aged(rpc.came - read), rpc.offset
            if offset.error < new.error and not offset.excludes(new):
                return offset
        self._clocks[rpc.side] = session, rpc.came, rpc.offset
        return rpc.offset


def clock_reading() -> Record:
    """The current time by both of this machine's clocks, for the first line of a trace of a run with workers."""
    return {"clocks": {"at": time.perf_counter(), "unix_ns": time.time_ns()}}
