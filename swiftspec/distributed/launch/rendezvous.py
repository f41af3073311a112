"""Where ranks that were started again find the others: each says in the store that it is there, and rank 0, which alone
knows what has become of the job, calls those that it wants."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch.distributed.distributed_c10d import PrefixStore, Store

from swiftspec.distributed.launch.startup_barrier import Clock, Waiting, ranks
from swiftspec.distributed.launch.supervision import JobOver
from swiftspec.errors import RankLost


@dataclass(frozen=True, slots=True)
class Meeting:
    """Ranks that rank 0, which is one of them, has called together, and the page of the store that is theirs."""

    page: str
    ranks: tuple[int, ...]


GONE = 2.0  # seconds after which a life that has not counted on is taken to be dead


class Meetings:
    """One rank's view of them. A life of a rank has a name of its own, counts on while it waits, and is called at most
    once: so nobody waits for one that has said that it is there and died."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._seen: dict[str, tuple[int, float]] = {}  # by life, on rank 0: its count, and until when that is news

    def come(self, waiting: Waiting, say: Callable[[str], None]) -> Meeting:
        """Says that this rank is there, and waits until rank 0 calls it. Raises JobOver, RankLost where it does not,
        and the store's RuntimeError."""
        name, clock = secrets.token_hex(8), Clock(waiting)
        self._store.set(f"here {self._rank}", name)
        while not self._store.check([f"called {name}"]):
            self._store.add(f"count {name}", 1)
            if self._store.check(["over"]):
                raise JobOver
            if not clock.wait(lambda: say(f"rank {self._rank} is waiting for rank 0")):
                raise RankLost(f"rank 0 did not call {ranks([self._rank])} within {waiting.timeout:g} s")
        page, members = json.loads(self._store.get(f"called {name}"))
        return Meeting(page, tuple(members))

    def here(self, wanted: Iterable[int]) -> dict[int, str]:
        """Those of these ranks that have come, are alive and were not called, and the names of their lives. Who has
        come since the last look may be alive, which the next look tells."""
        came = [rank for rank in wanted if self._store.check([f"here {rank}"])]
        names = {rank: self._store.get(f"here {rank}").decode() for rank in came}
        return {rank: n for rank, n in names.items() if self._alive(n) and not self._store.check([f"called {n}"])}

    def _alive(self, name: str) -> bool:
        """Whether that life has counted on since it was seen first, and not long ago."""
        count, now = self._store.add(f"count {name}", 0), time.monotonic()
        before, until = self._seen.get(name, (count, now))
        if count != before:
            until = now + GONE
        self._seen[name] = count, until
        return now < until

    def call(self, wanted: Sequence[int]) -> Meeting | None:
        """On rank 0: calls these ranks if all of them are there."""
        names = self.here(wanted)
        if len(names) < len(wanted):
            return None
        meeting = Meeting(f"meeting {self._store.add('meetings', 1)}", (0, *wanted))
        for name in names.values():
            self._store.set(f"called {name}", json.dumps([meeting.page, meeting.ranks]))
        return meeting

    def page(self, meeting: Meeting) -> Store:
        """The part of the store that is a meeting's own."""
        return PrefixStore(meeting.page, self._store)

    def end(self) -> None:
        """On rank 0: it leaves for good."""
        with suppress(RuntimeError):  # the store has gone before
            self._store.set("over", "")
