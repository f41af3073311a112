"""Interface between a rank and its supervisor, the process that restarts ranks that have died or hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Literal

EXIT_PEER_LOST = 75  # exit code of a rank that exits because it lost a peer; the supervisor restarts it

RankState = Literal["up", "loading", "lost"]


class JobEnded(Exception):
    """Rank 0 has ended the job, so a restarted rank has nothing to rejoin."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """State of one rank as rank 0 sees it. `role` is "target" or "draft"; `restarts` is its incarnation number."""

    rank: int
    role: str
    pid: int
    state: RankState
    restarts: int


class Heartbeat:
    """Start time of the unit of work in progress: a forward, a message or a part of the weights.

    `busy_since` is a `time.monotonic` time, or None while the rank waits for a peer. The supervisor treats a rank whose
    unit of work takes too long as blocked.
    """

    def __init__(self) -> None:
        self.busy_since: float | None = None

    def mark_busy(self) -> None:
        """Starts a unit of work and thereby ends the previous one."""
        self.busy_since = time.monotonic()

    def mark_idle(self) -> None:
        """Marks the rank as waiting for a peer."""
        self.busy_since = None


class RankTable:
    """State of all ranks of a job, kept on rank 0.

    Thread-safe; `on_change` is called with all ranks after each change."""

    def __init__(self, on_change: Callable[[Sequence[RankInfo]], None]) -> None:
        self._on_change, self._lock = on_change, Lock()
        self._ranks: dict[int, RankInfo] = {}

    def update(self, infos: Iterable[RankInfo]) -> None:
        """Adds or replaces the entries of ranks that have joined."""
        with self._lock:
            self._merge({info.rank: info for info in infos})

    def set_state(self, role: str, state: RankState) -> None:
        """Sets the state of all ranks of a group."""
        with self._lock:
            self._merge({rank: replace(info, state=state) for rank, info in self._ranks.items() if info.role == role})

    def _merge(self, changed: dict[int, RankInfo]) -> None:
        merged = dict(sorted((self._ranks | changed).items()))
        if merged != self._ranks:
            self._ranks = merged
            self._on_change(list(merged.values()))


@dataclass(frozen=True, slots=True)
class SupervisorLink:
    """What a supervised rank shares with its supervisor.

    `incarnation`: 0 for the first start of this rank, then the number of restarts.
    `heartbeat`: when the current unit of work began.
    `on_ranks_changed`: called on rank 0, in any thread, with all ranks whenever the state of one changes.
    `on_ready`: called when the rank has loaded and starts to serve.
    """

    incarnation: int = 0
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    on_ranks_changed: Callable[[Sequence[RankInfo]], None] = lambda ranks: None
    on_ready: Callable[[], None] = lambda: None
