"""Tensor parallelism over the GPUs of one machine: small sums in the projections' kernels, messages in one of
their own, the rest by NCCL."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from swiftspec.backends.cuda.linear import RowwiseReduce, max_lines
from swiftspec.backends.cuda.peers import PeerAccessError, PeerGroup
from swiftspec.distributed.collectives.torch_dist import TorchDistGroup
from swiftspec.errors import RankLost

PEER_TIMEOUT_S = 10.0  # seconds that a kernel waits for a peer; ranks begin a forward within milliseconds of each other
CLOSE_TIMEOUT_S = (
    PEER_TIMEOUT_S + 5
)  # seconds that a rank waits for the others, whose kernels may yet wait, to let go of its memory


class PeerMemoryGroup:
    """A `model.group.Group` whose products of few rows are summed over peer memory (csrc/cuda/peers/channel.h), in
    rank order and rounded as `sum_in_rank_order` does it: bitwise equal on all ranks, and to what NCCL's part gives. So
    are messages gathered, a population's logits too.

    A peer that does not come ends the kernels that wait for it, and with them the process's use of its GPU.
    """

    memory = None

    def __init__(self, store: Store, group: TorchDistGroup, peers: PeerGroup) -> None:
        self.name, self.rank, self.size = group.name, group.rank, group.size
        self.all_reduce = RowwiseReduce(peers.communicator, group.all_reduce)
        self._store, self._group, self._peers = store, group, peers

    @staticmethod
    def join(store: Store, group: TorchDistGroup, *, width: int, device: torch.device) -> PeerMemoryGroup:
        """Meets the other ranks of `group`, which are all on this machine. `width`: outputs of the widest product that
        is summed. Raises PeerAccessError on all of them where they cannot reach each other's memory."""

        def exchange(topic: str, mine: bytes) -> list[bytes]:
            keys = [f"{group.name} {topic} {rank}" for rank in range(group.size)]
            store.set(keys[group.rank], mine.hex())
            return [bytes.fromhex(store.get(key).decode()) for key in keys]

        peers = PeerGroup(group.rank, group.size, max_lines(width), device, exchange, PEER_TIMEOUT_S)
        return PeerMemoryGroup(store, group, peers)

    def all_gather(self, x: Tensor) -> Tensor:
        """[...] -> [size, ...], in rank order."""
        sums = self._peers.communicator
        return sums.gather(x) if sums.supports(x) else self._group.all_gather(x)

    def captures(self, x: Tensor) -> bool:
        return self._peers.communicator.supports(x) or self._group.captures(x)

    def lost(self, error: Exception) -> RankLost | None:
        found = self._peers.communicator.describe_fault()
        return None if found is None else RankLost(f"group {self.name}: {found}")

    def close(self) -> None:
        """Leaves the group. A rank's memory goes when the others have let go of it, or do not for too long."""
        self._peers.close()
        until, gone = time.monotonic() + CLOSE_TIMEOUT_S, f"{self.name} gone"
        try:
            self._store.add(gone, 1)
            while self._store.add(gone, 0) < self.size and time.monotonic() < until:
                time.sleep(0.01)
        except RuntimeError:  # the store went with its rank
            pass
        self._peers.free()
        self._group.close()


def join(
    store: Store, name: str, rank: int, size: int, *, device: torch.device, timeout: timedelta, width: int
) -> TorchDistGroup | PeerMemoryGroup:
    """A group over NCCL; with a `width`, see `PeerParallel.join`, one whose kernels sum by themselves, where the GPUs
    reach each other: those of desktops mostly do not."""
    group = TorchDistGroup.join(store, name, rank, size, device=device, timeout=timeout)
    if width == 0:
        return group
    try:
        return PeerMemoryGroup.join(store, group, width=width, device=device)
    except PeerAccessError:
        return group
    except BaseException:
        group.close()
        raise
