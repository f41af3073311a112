"""Collectives through shared memory, between CPU ranks of one machine."""

from __future__ import annotations

from datetime import timedelta

from torch import Tensor
from torch.distributed.distributed_c10d import Store

from swiftspec.backends.cpu.shm import ShmCollectives, new_name
from swiftspec.errors import RankLost


class SharedMemoryGroup:
    """A `TensorParallelGroup` through shared memory, by the LL protocol (csrc/common/ll.h).

    Sums in rank order, so results are bitwise identical on all ranks. Calls raise RankLost within a fraction of a
    second if a peer has exited, and after the timeout given to `join` if a peer is blocked.
    """

    def __init__(self, name: str, group: ShmCollectives) -> None:
        self.name, self.rank, self.size = name, group.rank, group.size
        self.memory = group

    @staticmethod
    def join(store: Store, name: str, rank: int, size: int, *, spin: bool, timeout: timedelta) -> SharedMemoryGroup:
        """Joins group `name`. Raises RankLost if a rank does not join.

        `spin`: whether waiting ranks busy-wait, for which every rank of this machine must have its own core.
        """
        if rank == 0:
            store.set(name, new_name())
        try:
            group = ShmCollectives(store.get(name).decode(), rank, size, spin=spin, timeout_s=timeout.total_seconds())
        except OSError as error:
            raise RankLost(f"group {name}: rank {rank} of {size} could not join ({error})") from None
        return SharedMemoryGroup(name, group)

    def all_gather(self, x: Tensor) -> Tensor:
        """Gathers `x` of all ranks in rank order: [size, *x.shape]."""
        try:
            return self.memory.all_gather(x)
        except OSError as error:
            raise self._gone(error) from None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of `x` over all ranks, added in rank order. May overwrite `x`."""
        try:
            return self.memory.all_reduce(x)
        except OSError as error:
            raise self._gone(error) from None

    def captures(self, x: Tensor) -> bool:
        return False  # the host performs these collectives, which a CUDA graph cannot contain

    def lost(self, error: Exception) -> RankLost | None:
        return self._gone(error) if isinstance(error, OSError) else None

    def _gone(self, error: OSError) -> RankLost:
        """Returns the RankLost to raise for an error of shared memory: a peer has exited or is blocked."""
        return RankLost(f"group {self.name}: rank {self.rank} of {self.size}: {error}")

    def close(self) -> None:
        """Leaves the group."""
        self.memory.close()

    def abort(self) -> None:
        """Leaves a group of which a rank is lost or blocked."""
        self.memory.close()
