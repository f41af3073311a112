"""A tensor-parallel group whose ranks are threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from swiftspec.distributed.collectives.peers import PeerMemoryGroup
from swiftspec.distributed.collectives.torch_dist import sum_in_rank_order

T = TypeVar("T")


class ThreadGroup:
    """One rank's end of the group. A rank that fails breaks the barrier, so the others fail too and nothing hangs."""

    memory = None

    def __init__(self, rank: int, size: int, barrier: Barrier, places: list[Tensor]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._places = barrier, places

    def captures(self, x: Tensor) -> bool:
        return False

    def lost(self, error: Exception) -> None:
        return None

    def all_gather(self, x: Tensor) -> Tensor:
        self._places[self.rank] = x
        self._barrier.wait()
        parts = torch.stack(self._places)
        self._barrier.wait()
        return parts

    def all_reduce(self, x: Tensor) -> Tensor:
        return sum_in_rank_order(self.all_gather(x))


def on_ranks(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """The result of `work` on each rank."""
    barrier, places = Barrier(size, timeout=60), [torch.empty(0)] * size

    def run(rank: int) -> T:
        try:
            return work(ThreadGroup(rank, size, barrier, places))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:  # the cause, not the barrier that it broke
        raise next((error for error in errors if "Barrier" not in type(error).__name__), errors[0])
    return [future.result() for future in futures]


def peers(group: ThreadGroup, most: int) -> PeerMemoryGroup:
    """A group whose messages of up to `most` bytes are gathered by a kernel, emulated by the ranks' threads."""
    sums = SimpleNamespace(supports=lambda x: x.nbytes <= most, gather=group.all_gather)
    ends: tuple[Any, Any, Any] = (None, group, SimpleNamespace(communicator=sums))
    group.name = "draft"  # pyright: ignore[reportAttributeAccessIssue]
    joined = PeerMemoryGroup(*ends)
    joined.all_reduce = group.all_reduce  # pyright: ignore[reportAttributeAccessIssue]
    return joined
