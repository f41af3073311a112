"""What a rank has to do with its keeper: a process that starts it again when it has died, hangs or is stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Literal

LOST = 75  # the exit code of a rank that leaves since another one is gone: start me again

State = Literal["up", "loading", "lost"]


class JobOver(Exception):
    """Rank 0 has left for good: there is nothing to come back to."""


@dataclass(frozen=True, slots=True)
class Member:
    """A rank of a job as rank 0 sees it. `role`: "target" or "draft"; `restarts`: how often it was started again."""

    rank: int
    role: str
    pid: int
    state: State
    restarts: int


class Pulse:
    """When the piece of work under way began, which a forward, a message or a part of the weights is; None where the
    rank waits for somebody else. A piece that takes very long means that the rank hangs."""

    def __init__(self) -> None:
        self.since: float | None = None

    def work(self) -> None:
        """A piece begins, and so the one before has ended."""
        self.since = time.monotonic()

    def rest(self) -> None:
        """Nothing is to be done."""
        self.since = None


class Members:
    """All ranks of a job, as rank 0 knows them. Used by several threads."""

    def __init__(self, changed: Callable[[Sequence[Member]], None]) -> None:
        self._changed, self._lock = changed, Lock()
        self._members: dict[int, Member] = {}

    def take(self, members: Iterable[Member]) -> None:
        """Ranks that have come, or come again."""
        with self._lock:
            self._put({member.rank: member for member in members})

    def mark(self, role: str, state: State) -> None:
        """The state of a whole group."""
        with self._lock:
            self._put({r: replace(member, state=state) for r, member in self._members.items() if member.role == role})

    def _put(self, some: dict[int, Member]) -> None:
        now = dict(sorted((self._members | some).items()))
        if now != self._members:
            self._members = now
            self._changed(list(now.values()))


@dataclass(frozen=True, slots=True)
class Keeping:
    """A rank that is kept. `life`: 0, or how often it has been started again; `changed` hears on rank 0, in any thread,
    what the ranks are like whenever that changes; `ready` is called where the rank begins what it is there for."""

    life: int = 0
    pulse: Pulse = field(default_factory=Pulse)
    changed: Callable[[Sequence[Member]], None] = lambda members: None
    ready: Callable[[], None] = lambda: None
