"""Rendezvous of restarted ranks with the rest of the job.

Each restarted rank registers in the store and waits. Rank 0, which alone knows the state of the job, admits registered
ranks once all ranks that it needs are registered and alive. The admitted ranks then start as at the start of the job.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store

from swiftspec.distributed.launch.startup_barrier import LogFn, PollTimer, Timeouts, first_line, format_ranks
from swiftspec.distributed.launch.supervisor_link import JobEnded
from swiftspec.errors import RankLost, UserError

DEAD_AFTER_S = 2.0  # seconds; an incarnation is considered dead if its counter was not incremented for this time
# Seconds for ranks that are all alive to pass the startup barrier and connect. Before, each may repeat the GPU trial
# (builder/gpu_trial.py: 45 s) if no verdict of an earlier one was stored.
REJOIN_TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True)
class RendezvousInfo:
    """Result of a rendezvous: the participating ranks, including rank 0, and the part of the store that is reserved for
    them. `timeout_s`: longest wait in their startup barrier, in seconds; short, because all of them are alive."""

    store: Store
    ranks: Sequence[int]
    timeout_s: float = REJOIN_TIMEOUT_S


class Rendezvous:
    """One rank's access to the rendezvous.

    Each incarnation of a rank registers under a unique name, increments a counter in the store while it waits, and is
    admitted at most once. Rank 0 therefore never waits for an incarnation that has registered and then died.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank
        # On rank 0, by incarnation: the last counter value, and the time until which the incarnation is alive.
        self._seen: dict[str, tuple[int, float]] = {}

    def rejoin(self, size: int, timeouts: Timeouts, log: LogFn) -> RendezvousInfo:
        """Takes part in the rendezvous as a restarted rank of a job with `size` ranks. A restarted rank 0 waits for all
        other ranks and admits them.

        Raises UserError on rank 0 if a rank does not arrive in time, JobEnded if rank 0 has ended the job, and RankLost
        if rank 0 does not admit this rank in time or the store is gone.
        """
        self._store.set_timeout(timedelta(seconds=REJOIN_TIMEOUT_S))
        try:
            if self._rank > 0:
                return self._await_admission(timeouts, log)
            others, clock = range(1, size), PollTimer(timeouts)
            while (info := self.try_form(others)) is None:
                missing = sorted(set(others) - self.alive_ranks(others).keys())
                # `sleep` calls the function before it returns, so that it does not outlive `missing`
                if not clock.sleep(lambda: log(f"waiting for {format_ranks(missing)}")):  # noqa: B023
                    raise UserError(f"{format_ranks(missing)} did not rejoin within {timeouts.timeout_s:g} s")
        except RuntimeError as error:
            raise RankLost(f"lost the connection to the store ({first_line(error)})") from None
        return info

    def _await_admission(self, timeouts: Timeouts, log: LogFn) -> RendezvousInfo:
        """Registers this rank and blocks until rank 0 admits it."""
        name, timer = secrets.token_hex(8), PollTimer(timeouts)
        self._store.set(f"here {self._rank}", name)
        while not self._store.check([f"called {name}"]):
            self._store.add(f"count {name}", 1)
            if self.job_has_ended():
                raise JobEnded
            if not timer.sleep(lambda: log(f"rank {self._rank} is waiting for rank 0")):
                raise RankLost(f"rank 0 did not admit {format_ranks([self._rank])} within {timeouts.timeout_s:g} s")
        store_prefix, ranks = json.loads(self._store.get(f"called {name}"))
        return RendezvousInfo(PrefixStore(store_prefix, self._store), tuple(ranks))

    def alive_ranks(self, wanted: Iterable[int]) -> dict[int, str]:
        """Returns the ranks of `wanted` that are registered, alive and not yet admitted, each with the name of its
        incarnation.

        An incarnation is alive if its counter has changed since an earlier call. A newly registered rank is therefore
        included in the second call at the earliest.
        """
        registered = [rank for rank in wanted if self._store.check([f"here {rank}"])]
        names = {rank: self._store.get(f"here {rank}").decode() for rank in registered}
        return {
            rank: name
            for rank, name in names.items()
            if self._is_alive(name) and not self._store.check([f"called {name}"])
        }

    def _is_alive(self, name: str) -> bool:
        """Returns whether the incarnation `name` has incremented its counter within the last `DEAD_AFTER_S`; False when
        it is seen for the first time."""
        count, now = self._store.add(f"count {name}", 0), time.monotonic()
        previous, alive_until = self._seen.get(name, (count, now))
        if count != previous:
            alive_until = now + DEAD_AFTER_S
        self._seen[name] = count, alive_until
        return now < alive_until

    def try_form(self, wanted: Sequence[int]) -> RendezvousInfo | None:
        """On rank 0: admits the ranks `wanted` and returns the rendezvous, or returns None if not all of them are
        registered and alive."""
        names = self.alive_ranks(wanted)
        if len(names) < len(wanted):
            return None
        store_prefix, ranks = f"rendezvous {self._store.add('rendezvous', 1)}", (0, *wanted)
        for name in names.values():
            self._store.set(f"called {name}", json.dumps([store_prefix, ranks]))
        return RendezvousInfo(PrefixStore(store_prefix, self._store), ranks)

    def end_job(self) -> None:
        """On rank 0: ends the job, so that registered ranks stop waiting."""
        with suppress(RuntimeError):  # the store is gone already
            self._store.set("over", "")

    def job_has_ended(self) -> bool:
        """Returns whether rank 0 has ended the job."""
        with suppress(RuntimeError):  # the store is gone: unknown
            return self._store.check(["over"])
        return False


@contextmanager
def losses_at_the_end_ignored(rendezvous: Rendezvous | None) -> Iterator[None]:
    """Context manager that raises JobEnded instead of RankLost if rank 0 has ended the job: a rank that is still
    starting then is not shut down, but sees its connections close. `rendezvous`: None without a supervisor."""
    try:
        yield
    except RankLost:
        if rendezvous is not None and rendezvous.job_has_ended():
            raise JobEnded from None
        raise
