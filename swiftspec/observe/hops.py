"""Exchanges with workers, and what their clocks are worth here."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from swiftspec.observe.lines import Record

KEPT = 4096  # hops that nobody has asked for


@dataclass(frozen=True, slots=True)
class Hop:
    """A message to a worker and its answer, or the growth that it tells of. Nanoseconds; `asked`, `came` by this
    machine's clock since 1970, `began` by the worker's. `span`: the worker's name for it."""

    side: str  # "target" or "draft"
    round: int  # -1: an opening
    asked: int
    came: int
    span: int
    began: int
    wall: int
    queue: int
    model: int

    def line(self) -> Record:
        """As a trace has it."""
        return {**asdict(self), "span": f"{self.span:016x}"}


@dataclass(frozen=True, slots=True)
class Offset:
    """How many nanoseconds a worker's clock is ahead of this machine's, and by how many this may be wrong: half of the
    round trip that it was read in."""

    ahead: int
    error: int

    @staticmethod
    def of(asked: int, clock: int, came: int) -> Offset:
        """Of a clock that was read between two moments here, most likely in the middle."""
        return Offset(clock - (asked + came) // 2, (came - asked + 1) // 2)

    def here(self, clock: int) -> int:
        """A moment of the worker's clock by this machine's."""
        return clock - self.ahead


@dataclass(slots=True)
class Hops:
    """Those of the request under way, and the clocks of the workers that have been asked (`clocks`, by their sides)."""

    clocks: dict[str, Offset] = field(default_factory=dict)
    taken: Callable[[Hop], None] | None = None  # hears of each as it comes
    _known: deque[Hop] = field(default_factory=lambda: deque(maxlen=KEPT))

    def add(self, hop: Hop) -> None:
        """Another one."""
        self._known.append(hop)
        if self.taken is not None:
            self.taken(hop)

    def take(self) -> list[Hop]:
        """Those since it was asked last."""
        known = [*self._known]
        self._known.clear()
        return known

    def head(self) -> Record:
        """What a trace's first line says of the clocks: this moment by both of this machine's, and the workers'."""
        known = {side: {"ahead_ns": each.ahead, "error_ns": each.error} for side, each in self.clocks.items()}
        return {"clocks": {"at": time.perf_counter(), "unix_ns": time.time_ns(), "workers": known}}
