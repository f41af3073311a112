"""Collectives over torch.distributed: Gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import re
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from swiftspec.errors import RankLost


class TorchDistGroup:
    """A `TensorParallelGroup` over torch's default process group: Gloo for CPU tensors, NCCL for CUDA tensors.

    A process belongs to one group only, so no communicator spans draft and target ranks. Calls raise RankLost after at
    most `timeout` if a peer is gone or blocked; NCCL aborts the process instead.
    """

    memory = None

    def __init__(self, name: str, rank: int, size: int, nccl: bool = False) -> None:
        self.name, self.rank, self.size = name, rank, size
        self._nccl = nccl

    @staticmethod
    def join(
        store: Store,
        name: str,
        rank: int,
        size: int,
        *,
        device: torch.device | str,
        timeout: timedelta,
        share_device: bool = False,
    ) -> TorchDistGroup:
        """Joins group `name`. `share_device`: several ranks on one GPU, which NCCL does not support: uses Gloo."""
        nccl = torch.device(device).type == "cuda" and not share_device
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if nccl else "gloo",
                store=PrefixStore(name, store),
                rank=rank,
                world_size=size,
                timeout=timeout,
            )
        except (dist.DistError, RuntimeError) as error:
            raise RankLost(f"group {name}: rank {rank} of {size} could not join ({_line(error)})") from error
        return TorchDistGroup(name, rank, size, nccl)

    def all_gather(self, x: Tensor) -> Tensor:
        """[...] -> [size, ...], in rank order."""
        parts = x.new_empty(self.size, *x.shape)
        try:
            dist.all_gather(list(parts.unbind(0)), x.contiguous())
        except RuntimeError as error:
            where = f"group {self.name}: rank {self.rank} of {self.size}: all_gather of {list(x.shape)} failed"
            raise RankLost(f"{where}, a rank is gone or late ({_line(error)})") from error
        return parts

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in rank order.

        Not `dist.all_reduce`, whose summation order depends on topology and size and differs between ranks. The tensors
        of a round are small, so gathering them costs little more; a prefill is bound by the forward.
        """
        return sum_in_rank_order(self.all_gather(x))

    def captures(self, x: Tensor) -> bool:
        return self._nccl  # a CUDA graph captures NCCL calls after a warm-up has connected the ranks

    def lost(self, error: Exception) -> RankLost | None:
        return None  # a lost peer has raised RankLost already

    def close(self) -> None:
        """Leaves the group; the process may then join another."""
        dist.destroy_process_group()


def sum_in_rank_order(parts: Tensor) -> Tensor:
    """Sums `parts` [size, ...] over ranks and returns [...], bitwise identical on every rank.

    Adds in rank order in float32 (float64 for float64) and rounds once.
    """
    wide = torch.float64 if parts.dtype == torch.float64 else torch.float32
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


def _line(error: BaseException) -> str:
    """The library's error message without its source location and advice."""
    text = " ".join(str(error).split())
    return re.sub(r"^\[[^\]]*\] ", "", text).partition(". ")[0] or type(error).__name__
