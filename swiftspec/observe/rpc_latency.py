"""Exchanges with workers, and what their clocks are worth here."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

from swiftspec.observe.trace_format import Record

MAX_BUFFERED_RPCS = 4096  # hops that nobody has asked for
MAX_CLOCK_DRIFT = 1e-4  # seconds by which two machines' clocks may come apart in a second


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How many nanoseconds a worker's clock is ahead of this machine's, and by how many this may be wrong."""

    ahead: int
    error: int

    @staticmethod
    def of(asked: int, clock: int, came: int) -> ClockOffset:
        """Of a clock that was read between two moments here, most likely in the middle."""
        return ClockOffset(clock - (asked + came) // 2, (came - asked + 1) // 2)

    def aged(self, passed: int) -> ClockOffset:
        """What it is worth so many nanoseconds later."""
        return replace(self, error=self.error + int(MAX_CLOCK_DRIFT * passed))

    def excludes(self, other: ClockOffset) -> bool:
        """Whether they cannot both be true: a clock was set."""
        return abs(self.ahead - other.ahead) > self.error + other.error

    def to_local(self, clock: int) -> int:
        """A moment of the worker's clock by this machine's."""
        return clock - self.ahead


@dataclass(frozen=True, slots=True)
class RpcRecord:
    """A message to a worker and its answer, or the growth that it tells of. Nanoseconds; `asked`, `came` by this
    machine's clock since 1970, `began` by the worker's, which `clock` relates to this machine's. `span`: the worker's
    name for it."""

    side: str  # "target" or "draft"
    round: int  # -1: an opening
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
        """As far as this exchange tells by itself: the worker's part lies within it."""
        return ClockOffset.of(self.asked, self.began, max(self.came - self.wall, self.asked))

    def line(self) -> Record:
        """As a trace has it."""
        return {**asdict(self), "span": f"{self.span:016x}"}


@dataclass(slots=True)
class RpcLog:
    """Those of the request under way. `on_record` hears of each as it comes."""

    on_record: Callable[[RpcRecord], None] | None = None
    _known: deque[RpcRecord] = field(default_factory=lambda: deque(maxlen=MAX_BUFFERED_RPCS))
    _clocks: dict[str, tuple[bytes, int, ClockOffset]] = field(
        default_factory=dict
    )  # by side: session, when read, what

    def add(self, hop: RpcRecord, session: bytes) -> None:
        """Another one, in that session of the worker's."""
        hop = replace(hop, clock=self._clock(hop, session))
        self._known.append(hop)
        if self.on_record is not None:
            self.on_record(hop)

    def take(self) -> list[RpcRecord]:
        """Those since it was asked last."""
        known = [*self._known]
        self._known.clear()
        return known

    def _clock(self, hop: RpcRecord, session: bytes) -> ClockOffset:
        """The clock of whoever has answered: as read in the exchange that bounds it best, of those in this session, as
        another session may be another machine's."""
        before, read, offset = self._clocks.get(hop.side, (b"", 0, hop.offset))
        if before == session:
            offset, told = offset.aged(hop.came - read), hop.offset
            if offset.error < told.error and not offset.excludes(told):
                return offset
        self._clocks[hop.side] = session, hop.came, hop.offset
        return hop.offset


def clock_reading() -> Record:
    """What a trace's first line says where workers run a model: this moment by both of this machine's clocks."""
    return {"clocks": {"at": time.perf_counter(), "unix_ns": time.time_ns()}}
