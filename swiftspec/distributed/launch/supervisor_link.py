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
    """State of one rank as rank 0 sees it. `role`: its group, "target" or "draft". `restarts`: number of its
    incarnation."""

    rank: int
    role: str
    pid: int
    state: RankState
    restarts: int


class Heartbeat:
    """Record of whether a rank makes progress. Its work consists of units: a forward, a message or a part of the
    weights; the supervisor considers a rank blocked if one unit takes too long.

    `busy_since`: `time.monotonic` time at which the current unit began, or None while the rank waits for a peer.
    """

    def __init__(self) -> None:
        self.busy_since: float | None = None

    def mark_busy(self) -> None:
        """Marks the start of a unit of work, and thereby the end of the previous unit."""
        self.busy_since = time.monotonic()

    def mark_idle(self) -> None:
        """Marks the rank as waiting for a peer."""
        self.busy_since = None


class RankTable:
    """Table of the states of all ranks of a job, on rank 0. Thread-safe. `on_change`: called with all ranks after each
    change."""

    def __init__(self, on_change: Callable[[Sequence[RankInfo]], None]) -> None:
        self._on_change, self._lock = on_change, Lock()
        self._ranks: dict[int, RankInfo] = {}

    def update(self, infos: Iterable[RankInfo]) -> None:
        """Adds or replaces the entries of ranks that have joined."""
        with self._lock:
            self._merge({info.rank: info for info in infos})

    def set_state(self, role: str, state: RankState) -> None:
        """Sets the state of all ranks of the group `role`."""
        with self._lock:
            self._merge({rank: replace(info, state=state) for rank, info in self._ranks.items() if info.role == role})

    def _merge(self, changed: dict[int, RankInfo]) -> None:
        merged = dict(sorted((self._ranks | changed).items()))
        if merged != self._ranks:
            self._ranks = merged
            self._on_change(list(merged.values()))


@dataclass(frozen=True, slots=True)
class SupervisorLink:
    """Data and callbacks that a supervised rank shares with its supervisor.

    `incarnation`: number of restarts of this rank, 0 at first.
    `heartbeat`: start time of the current unit of work.
    `on_ranks_changed`: called on rank 0, in any thread, with the states of all ranks whenever a state changes.
    `on_ready`: called when the rank has loaded and starts to serve.
    """

    incarnation: int = 0
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    on_ranks_changed: Callable[[Sequence[RankInfo]], None] = lambda ranks: None
    on_ready: Callable[[], None] = lambda: None
