"""The ranks of one job, as their launcher numbers them, and the cores that they run on. Only this module reads the
launcher's environment."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from swiftspec.errors import UserError

START_TIMEOUT = 300.0  # seconds between the first rank that calls and the last


@dataclass(frozen=True, slots=True)
class World:
    """All ranks, as their launcher numbers them. `host`: where rank 0's machine can be reached."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    store: Store
    cores: frozenset[int] = field(default_factory=lambda: frozenset(available_cores()))  # of this machine
    jobs: Iterator[int] = field(default_factory=itertools.count)

    def next_job(self) -> World:
        """The same ranks with a clean page of the store: they may form an engine, leave it and form another."""
        return replace(self, store=PrefixStore(f"job {next(self.jobs)}", self.store))

    def part(self, size: int, name: str) -> World:
        """The first `size` ranks as a world of their own, which a rank from `size` on is no part of. All ranks of the
        whole give it the same name."""
        first = self.rank - self.local_rank  # of this machine
        local = max(min(self.local_size, size - first), 1)
        store = PrefixStore(name, self.store)
        return replace(self, size=size, local_size=local, store=store, jobs=itertools.count())

    @property
    def one_machine(self) -> bool:
        return self.local_size == self.size

    @property
    def spin(self) -> bool:
        """Whether a rank that waits may keep its core busy: there is one for each."""
        return self.local_size <= len(self.cores)

    def own_cores(self) -> set[int]:
        """This rank's share of its machine's cores, which no other rank runs on; all of them where they are too few."""
        cores = sorted(self.cores)
        if not self.spin:
            return set(cores)
        count = len(cores)
        return set(cores[self.local_rank * count // self.local_size : (self.local_rank + 1) * count // self.local_size])


def available_cores() -> set[int]:
    """The cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # not everywhere
    return affinity(0) if affinity is not None else set(range(os.cpu_count() or 1))


def run_on(cores: set[int]) -> None:
    """Keeps this process on these cores, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def join_world() -> World | None:
    """The ranks that a launcher such as torchrun has started, this one among them; None if it is alone. Raises
    UserError where the launcher's variables make no sense."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    try:
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        host = os.environ["MASTER_ADDR"]
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=START_TIMEOUT)))
    except (KeyError, ValueError, RuntimeError) as error:  # the store's are RuntimeErrors
        reason = str(error).partition("\n")[0]
        raise UserError(f"WORLD_SIZE is set, but {reason}: start several ranks with torchrun") from None
    world = World(rank, size, local_rank, local_size, host, store)
    run_on(world.own_cores())  # before any thread is made; two ranks on one core would wait for each other
    return world
