"""Tensor parallelism through shared memory: ranks on the CPU of one machine, without a library between them."""

from __future__ import annotations

from datetime import timedelta

from torch import Tensor
from torch.distributed.distributed_c10d import Store

from swiftspec.backends.cpu.shm import SharedGroup, new_name
from swiftspec.errors import RankLost


class SharedMemoryGroup:
    """A `model.group.Group` by the LL protocol (csrc/common/ll.h): sums in rank order, bitwise equal on all ranks.

    A peer that has ended raises RankLost within a fraction of a second, a silent one after the timeout.
    """

    def __init__(self, name: str, group: SharedGroup) -> None:
        self.name, self.rank, self.size = name, group.rank, group.size
        self.memory = group

    @staticmethod
    def join(store: Store, name: str, rank: int, size: int, *, spin: bool, timeout: timedelta) -> SharedMemoryGroup:
        """Meets the other ranks of group `name`. `spin`: every rank of this machine has a core of its own."""
        if rank == 0:
            store.set(name, new_name())
        try:
            group = SharedGroup(store.get(name).decode(), rank, size, spin=spin, timeout_s=timeout.total_seconds())
        except OSError as error:
            raise RankLost(f"group {name}: rank {rank} of {size} could not join ({error})") from None
        return SharedMemoryGroup(name, group)

    def all_gather(self, x: Tensor) -> Tensor:
        """[...] -> [size, ...], in rank order."""
        try:
            return self.memory.all_gather(x)
        except OSError as error:
            raise self._gone(error) from None

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in rank order. May be in place: `x` is of no more use."""
        try:
            return self.memory.all_reduce(x)
        except OSError as error:
            raise self._gone(error) from None

    def captures(self, x: Tensor) -> bool:
        return False  # the host makes them

    def lost(self, error: Exception) -> RankLost | None:
        return self._gone(error) if isinstance(error, OSError) else None

    def _gone(self, error: OSError) -> RankLost:
        """What has become of a peer."""
        return RankLost(f"group {self.name}: rank {self.rank} of {self.size}: {error}")

    def close(self) -> None:
        """Leaves the group."""
        self.memory.close()
