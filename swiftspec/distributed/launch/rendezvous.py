"""Rendezvous of restarted ranks with the rest of the job.

Each restarted rank registers in the store and waits. Rank 0, which alone knows the state of the job, forms a group of
registered ranks once all those that it needs are alive.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch.distributed.distributed_c10d import PrefixStore, Store

from swiftspec.distributed.launch.startup_barrier import PollTimer, Timeouts, format_ranks
from swiftspec.distributed.launch.supervision import JobEnded
from swiftspec.errors import RankLost


@dataclass(frozen=True, slots=True)
class RendezvousInfo:
    """Result of a rendezvous: its ranks, rank 0 included, and the store prefix that is reserved for them."""

    store_prefix: str
    ranks: tuple[int, ...]


DEAD_AFTER_S = 2.0  # without a heartbeat increment, an incarnation is considered dead after this time


class Rendezvous:
    """One rank's access to the rendezvous.

    Each incarnation of a rank registers under a unique name, increments a counter while it waits, and joins at most one
    group. Rank 0 therefore never waits for an incarnation that registered and then died.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._seen: dict[str, tuple[int, float]] = {}  # rank 0: by incarnation, last counter value and alive until

    def join(self, timeouts: Timeouts, log: Callable[[str], None]) -> RendezvousInfo:
        """Registers this rank and waits until rank 0 admits it.

        Raises JobEnded, RankLost after the timeout, and RuntimeError if the store is gone.
        """
        name, timer = secrets.token_hex(8), PollTimer(timeouts)
        self._store.set(f"here {self._rank}", name)
        while not self._store.check([f"called {name}"]):
            self._store.add(f"count {name}", 1)
            if self._store.check(["over"]):
                raise JobEnded
            if not timer.sleep(lambda: log(f"rank {self._rank} is waiting for rank 0")):
                raise RankLost(f"rank 0 did not admit {format_ranks([self._rank])} within {timeouts.timeout_s:g} s")
        store_prefix, ranks = json.loads(self._store.get(f"called {name}"))
        return RendezvousInfo(store_prefix, tuple(ranks))

    def alive_ranks(self, wanted: Iterable[int]) -> dict[int, str]:
        """The ranks among `wanted` that have registered, are alive and not yet admitted, with the names of
        their incarnations.

        A rank that has registered since the previous call is included from the next call on, if it is alive.
        """
        registered = [rank for rank in wanted if self._store.check([f"here {rank}"])]
        names = {rank: self._store.get(f"here {rank}").decode() for rank in registered}
        return {
            rank: name
            for rank, name in names.items()
            if self._is_alive(name) and not self._store.check([f"called {name}"])
        }

    def _is_alive(self, name: str) -> bool:
        """Whether that incarnation has incremented its counter recently, after it was first seen."""
        count, now = self._store.add(f"count {name}", 0), time.monotonic()
        previous, alive_until = self._seen.get(name, (count, now))
        if count != previous:
            alive_until = now + DEAD_AFTER_S
        self._seen[name] = count, alive_until
        return now < alive_until

    def try_form(self, wanted: Sequence[int]) -> RendezvousInfo | None:
        """On rank 0: admits these ranks if all of them are alive; otherwise returns None."""
        names = self.alive_ranks(wanted)
        if len(names) < len(wanted):
            return None
        info = RendezvousInfo(f"rendezvous {self._store.add('rendezvous', 1)}", (0, *wanted))
        for name in names.values():
            self._store.set(f"called {name}", json.dumps([info.store_prefix, info.ranks]))
        return info

    def store_of(self, info: RendezvousInfo) -> Store:
        """The part of the store that is reserved for these ranks."""
        return PrefixStore(info.store_prefix, self._store)

    def end_job(self) -> None:
        """On rank 0: ends the job, so that registered ranks stop waiting."""
        with suppress(RuntimeError):  # the store is gone already
            self._store.set("over", "")
