"""The ranks of one job: their numbers, their store and rendezvous, and the CPU cores that they run on."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch.distributed.distributed_c10d import PrefixStore, Store

from swiftspec import __version__
from swiftspec.distributed.launch.launched_rank import LaunchedRank, explicit_rank, launched
from swiftspec.distributed.launch.rendezvous import Rendezvous, RendezvousInfo
from swiftspec.distributed.launch.startup_barrier import (
    Entry,
    LogFn,
    StartupBarrier,
    Timeouts,
    Validator,
    describe_difference,
    no_log,
)
from swiftspec.distributed.launch.store import open_store
from swiftspec.distributed.launch.supervisor_link import SupervisorLink
from swiftspec.errors import UserError
from swiftspec.settings_schema import require

PCI_DEVICES = Path("/sys/bus/pci/devices")


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a job as one of them, `rank`, sees them. Their launcher has numbered them.

    `local_rank`, `local_size`: rank among the ranks of this machine, and their number.
    `host`: address of rank 0's machine.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    store: Store
    # Cores of this machine that its ranks share.
    cores: frozenset[int] = field(default_factory=lambda: frozenset(available_cores()))
    engine_numbers: Iterator[int] = field(default_factory=itertools.count)  # numbers of engines, see `next_engine`
    log: LogFn = no_log  # writes one line of progress
    timeouts: Timeouts = field(default_factory=Timeouts)
    supervisor: SupervisorLink | None = None  # None: ranks are not restarted
    rendezvous: Rendezvous | None = None  # set if ranks are restarted
    active_ranks: Sequence[int] | None = None  # participants of startup barriers; None: all ranks

    @staticmethod
    def join(
        rank: int,
        size: int,
        store_address: str,
        *,
        local_rank: int | None = None,
        local_size: int | None = None,
        cores: Collection[int] | None = None,
        log: LogFn = no_log,
        timeouts: Timeouts | None = None,
    ) -> World:
        """Joins the ranks of a job from explicit values, for a launcher that does not set torchrun's environment
        variables, such as Ray. Blocks until all ranks have joined, and pins this process to its cores.

        `rank`, `size`: number of this rank, and number of ranks.
        `store_address`: HOST:PORT at which rank 0 serves the store; a free port of rank 0's machine.
        `local_rank`, `local_size`: rank among the ranks of this machine, and their number, if the job has several
            machines. With device "cuda" a rank takes the GPU of its local rank, or the only one that the launcher shows
            it.
        `cores`: cores of this machine that its ranks share; None: all.
        `log`: receives lines about missing ranks.

        Raises UserError if the values are not consistent or a rank does not join, and RankLost if rank 0 is gone.
        """
        here = explicit_rank(rank, size, store_address, local_rank, local_size)
        shared = frozenset(cores or available_cores())
        missing = set(shared - available_cores())
        require(not missing, f"cores {missing} are not available to this process")
        return _join(here, log, timeouts or Timeouts(), None, shared)

    def barrier(self, name: str) -> StartupBarrier:
        """Returns the startup barrier `name`, in which all active ranks take part."""
        members = range(self.size) if self.active_ranks is None else self.active_ranks
        return StartupBarrier(PrefixStore(name, self.store), self.rank, members, self.log, self.timeouts)

    def next_engine(self) -> World:
        """Returns a copy with an unused store prefix, so that the same ranks can build one engine after another. All
        ranks must call it the same number of times."""
        return replace(self, store=PrefixStore(f"job {next(self.engine_numbers)}", self.store))

    def after_rendezvous(self, info: RendezvousInfo) -> World:
        """Returns the world of the ranks in `info`, with the part of the store that is reserved for them."""
        return replace(
            self,
            store=info.store,
            active_ranks=info.ranks,
            timeouts=replace(self.timeouts, timeout_s=info.timeout_s),
            engine_numbers=itertools.count(),
        )

    def subworld(self, size: int, name: str) -> World:
        """Returns a separate world of the ranks below `size`. Only these ranks may use it.

        `name`: store prefix of the world, the same on all its ranks.
        """
        first = self.rank - self.local_rank  # lowest rank on this machine
        local = max(min(self.local_size, size - first), 1)
        store = PrefixStore(name, self.store)
        return replace(self, size=size, local_size=local, store=store, engine_numbers=itertools.count())

    @property
    def incarnation(self) -> int:
        """Number of restarts of this rank."""
        return 0 if self.supervisor is None else self.supervisor.incarnation

    @property
    def one_machine(self) -> bool:
        return self.local_size == self.size

    @property
    def spin(self) -> bool:
        """Whether a waiting rank may busy-wait, because every rank of this machine has its own core."""
        return self.local_size <= len(self.cores)

    def own_cores(self) -> set[int]:
        """Returns the cores reserved for this rank; all cores if the machine has fewer cores than ranks."""
        cores = sorted(self.cores)
        if not self.spin:
            return set(cores)
        count = len(cores)
        return set(cores[self.local_rank * count // self.local_size : (self.local_rank + 1) * count // self.local_size])


def available_cores() -> set[int]:
    """Returns the cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # missing on some platforms
    return affinity(0) if affinity is not None else set(range(os.cpu_count() or 1))


def cores_near_gpu(pci_address: str | None, cores: Collection[int]) -> set[int]:
    """Returns those of `cores` that are on the NUMA node of a GPU; all of them if the system does not list
    its cores, or none of them is there.

    `pci_address`: of the GPU; None: unknown.
    """
    try:
        text = (PCI_DEVICES / str(pci_address) / "local_cpulist").read_text(encoding="ascii")
        return set(cores) & parse_cpu_list(text) or set(cores)
    except (OSError, ValueError):
        return set(cores)


def parse_cpu_list(text: str) -> set[int]:
    """Returns the cores of a list as Linux writes it: "0-3,8" is 0, 1, 2, 3 and 8. Raises ValueError on other text."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= {*range(int(first), int(last or first) + 1)}
    return found


def pin_to_cores(cores: set[int]) -> None:
    """Sets the CPU affinity of this process, if the operating system supports that."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def join_world(
    log: LogFn = no_log, timeouts: Timeouts | None = None, supervisor: SupervisorLink | None = None
) -> World | None:
    """Joins the ranks that a launcher such as torchrun has started, and pins this process to its cores. Returns None if
    there is only one rank.

    Blocks until all ranks have joined.
    `log`: receives lines about missing ranks.
    `supervisor`: None if ranks are not restarted.
    Raises UserError if the launcher's variables are invalid or a rank does not join, and RankLost if rank 0 or the
    store is gone.
    """
    here = launched()
    return None if here is None else _join(here, log, timeouts or Timeouts(), supervisor, frozenset(available_cores()))


def _join(
    here: LaunchedRank, log: LogFn, timeouts: Timeouts, supervisor: SupervisorLink | None, cores: frozenset[int]
) -> World:
    store = open_store(here, log, timeouts)
    world = World(
        rank=here.rank,
        size=here.size,
        local_rank=here.local_rank,
        local_size=here.local_size,
        host=here.host,
        store=store,
        cores=cores,
        log=log,
        timeouts=timeouts,
        supervisor=supervisor,
        rendezvous=None if supervisor is None else Rendezvous(store, here.rank),
    )
    if store.add(f"rank {here.rank} incarnation {world.incarnation}", 1) > 1:
        raise UserError(
            f"another process is rank {here.rank} of the job at {here.host}:{here.port}: give every rank its own number"
            " (RANK) and every job its own port (MASTER_PORT)"
        )
    if world.rendezvous is None or world.incarnation == 0:
        mine = {"WORLD_SIZE": here.size, "version": __version__}
        world.barrier("join").wait_all(mine, require_equal(mine, here.rank))
    else:
        world = world.after_rendezvous(world.rendezvous.rejoin(here.size, timeouts, log))
    # Before threads start, which inherit the affinity; two ranks on one core would block each other.
    pin_to_cores(world.own_cores())
    return world


def require_equal(mine: Entry, here: int) -> Validator:
    """Returns a validator that returns an error if a value of `mine`, the entry of rank `here`, differs on another
    rank."""

    def validate(said: dict[int, Entry]) -> str | None:
        found = (
            describe_difference(name, here, value, rank, words.get(name))
            for rank, words in said.items()
            for name, value in mine.items()
        )
        return next((line for line in found if line is not None), None)

    return validate
