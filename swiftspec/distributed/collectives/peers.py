"""Collectives over the GPUs of one machine through peer memory.

Small all-reduces are fused into the kernels of the row-parallel projections, and small all-gathers have their own
kernel. NCCL performs all other collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from swiftspec.backends.cuda.linear import RowwiseReduce, max_lines
from swiftspec.backends.cuda.peers import PeerAccessError, PeerCollectives
from swiftspec.distributed.collectives.torch_dist import TorchDistGroup
from swiftspec.errors import RankLost

PEER_TIMEOUT_S = 10.0  # seconds that a kernel waits for a peer; ranks begin a forward within milliseconds of each other
# The same until the first round has ended: before it, ranks capture graphs and load kernels, from a cold disk perhaps
STARTUP_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 3.0  # seconds that a closing rank waits for its peers; shorter than leave.LEAVE_TIMEOUT_S


class PeerMemoryGroup:
    """A `TensorParallelGroup` that reduces and gathers small tensors through peer memory.

    The kernels (csrc/cuda/peers/channel.h) sum in rank order and round as `sum_in_rank_order` does, so results are
    bitwise identical on all ranks, and identical to those of the NCCL path. If a peer does not arrive within
    `PEER_TIMEOUT_S`, or STARTUP_TIMEOUT_S until `end_startup`, the waiting kernels abort, after which the process
    cannot use its GPU any more.
    """

    memory = None

    def __init__(self, store: Store, group: TorchDistGroup, peers: PeerCollectives) -> None:
        self.name, self.rank, self.size = group.name, group.rank, group.size
        self.all_reduce = RowwiseReduce(peers.communicator, group.all_reduce)
        self._store, self._group, self._peers = store, group, peers

    @staticmethod
    def join(store: Store, group: TorchDistGroup, *, width: int, device: torch.device) -> PeerMemoryGroup:
        """Maps the peer memory of the ranks of `group`, all of which must be on this machine.

        `store`: used to exchange the memory handles.
        `width`: largest output size of a projection whose kernel all-reduces.
        Raises PeerAccessError on all ranks if the GPUs cannot access each other's memory.
        """

        def exchange(topic: str, mine: bytes) -> list[bytes]:
            keys = [f"{group.name} {topic} {rank}" for rank in range(group.size)]
            store.set(keys[group.rank], mine.hex())
            return [bytes.fromhex(store.get(key).decode()) for key in keys]

        peers = PeerCollectives(group.rank, group.size, max_lines(width), device, exchange, STARTUP_TIMEOUT_S)
        return PeerMemoryGroup(store, group, peers)

    def all_gather(self, x: Tensor) -> Tensor:
        """Gathers `x` of all ranks in rank order: [size, *x.shape]."""
        sums = self._peers.communicator
        return sums.gather(x) if sums.supports(x) else self._group.all_gather(x)

    def captures(self, x: Tensor) -> bool:
        return self._peers.communicator.supports(x) or self._group.captures(x)

    @property
    def exchanges(self) -> int:
        """Number of exchanges so far. Waits for the device."""
        return int(self._peers.communicator.epoch)

    def end_startup(self) -> None:
        """Shortens the time limit of waiting kernels to PEER_TIMEOUT_S, on all ranks."""
        self._peers.communicator.set_timeout(PEER_TIMEOUT_S)

    def lost(self, error: Exception) -> RankLost | None:
        found = self._peers.communicator.describe_fault()
        return None if found is None else RankLost(f"group {self.name}: {found}")

    def close(self) -> None:
        """Leaves the group. Frees this rank's memory once all ranks have unmapped it. Raises RuntimeError if they have
        not after CLOSE_TIMEOUT_S: the memory then stays until the process exits, since kernels of a peer may access it
        for up to PEER_TIMEOUT_S."""
        self._peers.close()
        until, gone = time.monotonic() + CLOSE_TIMEOUT_S, f"{self.name} gone"
        try:
            self._store.add(gone, 1)
            while (late := self._store.add(gone, 0) < self.size) and time.monotonic() < until:
                time.sleep(0.01)
        except RuntimeError:  # the store's process has ended
            late = False
        if late:
            raise RuntimeError(f"other ranks have not left after {CLOSE_TIMEOUT_S:g} s")
        self._peers.free()
        self._group.close()

    def abort(self) -> None:
        """Leaves a group of which a rank is lost or blocked, without waiting for the others. The memory stays mapped,
        since kernels may still wait for lines in it."""
        self._group.abort()


def join(
    store: Store,
    name: str,
    rank: int,
    size: int,
    *,
    device: torch.device,
    timeout: timedelta,
    width: int,
    log: Callable[[str], None] = lambda line: None,
) -> TorchDistGroup | PeerMemoryGroup:
    """Joins an NCCL group. Returns a `PeerMemoryGroup` on top of it if `width` > 0 and the GPUs exchange data through
    peer memory, which most consumer GPUs do not; otherwise returns the NCCL group.

    `width`: see `PeerMemoryGroup.join`. `log`: receives, on rank 0, the reason why the group uses NCCL only.
    """
    group = TorchDistGroup.join(store, name, rank, size, device=device, timeout=timeout)
    if width == 0:
        return group
    try:
        return PeerMemoryGroup.join(store, group, width=width, device=device)
    except PeerAccessError as error:
        if rank == 0:
            log(f"group {name} sums by NCCL, without peer memory: {error}")
        return group
    except BaseException:
        group.abort()  # the other ranks may wait in another call
        raise
