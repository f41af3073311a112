"""The ranks of one job, as their launcher numbers them, where they meet, and the cores that they run on."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch.distributed.distributed_c10d import PrefixStore, Store

from swiftspec import __version__
from swiftspec.distributed.keeping import Keeping
from swiftspec.distributed.launcher import launched
from swiftspec.distributed.roll import Judge, Roll, Say, Waiting, Words, difference, silence
from swiftspec.distributed.store import open_store
from swiftspec.errors import UserError


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
    say: Say = silence  # a line for whoever waits with this rank
    waiting: Waiting = field(default_factory=Waiting)
    keeping: Keeping | None = None  # None: nobody starts a rank again

    def roll(self, name: str) -> Roll:
        """The roll call of that name, which all ranks of this world make."""
        return Roll(PrefixStore(name, self.store), self.rank, self.size, self.say, self.waiting)

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


def join_world(say: Say = silence, waiting: Waiting | None = None, keeping: Keeping | None = None) -> World | None:
    """The ranks that a launcher such as torchrun has started, once all are there; None if this one is alone. `say`
    hears for whom it waits. `keeping`: who starts ranks again, if anybody. Raises UserError where the launcher's
    variables make no sense or a rank does not come, and RankLost."""
    here, waiting = launched(), waiting or Waiting()
    if here is None:
        return None
    store = open_store(here, say, waiting)
    world = World(
        here.rank, here.size, here.local_rank, here.local_size, here.host, store, say=say, waiting=waiting,
        keeping=keeping,
    )  # fmt: skip
    if store.add(f"rank {here.rank}", 1) > 1:
        raise UserError(
            f"another process with RANK={here.rank} is at MASTER_PORT={here.port} already: give every rank a number of"
            " its own, and every job a port"
        )
    mine = {"WORLD_SIZE": here.size, "version": __version__}
    world.roll("join").call(mine, same(mine, here.rank))
    run_on(world.own_cores())  # before any thread is made; two ranks on one core would wait for each other
    return world


def same(mine: Words, here: int) -> Judge:
    """Judges that all ranks say the same as this one."""

    def judge(said: dict[int, Words]) -> str | None:
        found = (
            difference(name, here, value, rank, words.get(name))
            for rank, words in said.items()
            for name, value in mine.items()
        )
        return next((line for line in found if line is not None), None)

    return judge
