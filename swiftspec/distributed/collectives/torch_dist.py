"""Collectives over torch.distributed: Gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from swiftspec.errors import RankLost

# What NCCL reports if it cannot allocate its shared memory, among other causes. Docker's default is 64 MB.
NCCL_SYSTEM_ERROR = re.compile("unhandled system error|ncclSystemError")
NCCL_SYSTEM_ADVICE = (
    "NCCL needs about 1 GB in /dev/shm: in a container use --shm-size=1g or --ipc=host; NCCL_DEBUG=INFO shows the cause"
)
# torch 2.13 has renamed it and warns of the old name
gather_into_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
GATHERED_ROWS = 32  # rows up to which each rank adds the whole sum; more than a round has


class TorchDistGroup:
    """A `TensorParallelGroup` over torch's default process group: Gloo for CPU tensors, NCCL for CUDA tensors. If ranks
    share a GPU, Gloo is used for both.

    A process belongs to one group only, so no communicator spans draft and target ranks. If a peer is gone or blocked,
    calls raise RankLost after at most the timeout given to `join`; with NCCL the process is aborted instead.
    """

    memory = None

    def __init__(self, name: str, rank: int, size: int, nccl: bool = False) -> None:
        self.name, self.rank, self.size = name, rank, size
        self._nccl = nccl
        self._one: Tensor | None = None  # see `sum_in_rank_order`

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
        """Joins group `name`. Raises RankLost if a rank does not join within `timeout`.

        `share_device`: whether several ranks may use one GPU. NCCL does not support that, so Gloo is used.
        """
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
        group = TorchDistGroup(name, rank, size, nccl)
        if nccl:  # connects the ranks in its first collective, which takes seconds and may fail
            group.all_gather(torch.zeros(1, device=device))
        return group

    def all_gather(self, x: Tensor) -> Tensor:
        """Gathers `x` of all ranks in rank order: [size, *x.shape]."""
        parts = x.new_empty(self.size, *x.shape)
        with self._translate_errors("all_gather", x):
            # one NCCL kernel writes `parts`; a list of outputs would be gathered in another buffer and copied
            gather_into_tensor(parts.view(-1), x.reshape(-1))
        return parts

    @contextmanager
    def _translate_errors(self, name: str, x: Tensor) -> Iterator[None]:
        """Returns a context manager that raises RankLost instead of an error of the collective `name` on `x`."""
        try:
            yield
        except RuntimeError as error:
            where = f"group {self.name}: rank {self.rank} of {self.size}: {name} of {list(x.shape)} failed"
            raise RankLost(f"{where}, a rank exited or timed out ({_line(error)})") from error

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of `x` [rows, ...] over all ranks, added in rank order.

        Does not call `dist.all_reduce`, because its summation order depends on topology and size and differs between
        ranks. In a round every rank gathers and adds everything, which takes one collective. In a prefill of more than
        GATHERED_ROWS rows each rank receives and adds a slice of the rows, and the sums are gathered: 2 (size - 1) /
        size times the bytes of `x` instead of size - 1 times. Both give the same bits.
        """
        if self._one is None or self._one.device != x.device or self._one.dtype != sum_dtype(x):
            self._one = torch.ones(1, dtype=sum_dtype(x), device=x.device)
        if self.size == 2 or len(x) <= GATHERED_ROWS:
            return sum_in_rank_order(self.all_gather(x), self._one)
        rows = -(-len(x) // self.size)  # of each rank's slice
        padded = x.new_zeros(rows * self.size, *x.shape[1:])
        padded[: len(x)] = x
        parts = torch.empty_like(padded)
        with self._translate_errors("all_to_all", x):
            dist.all_to_all_single(parts.view(-1), padded.view(-1))
        own = sum_in_rank_order(parts.view(self.size, rows, *x.shape[1:]), self._one)
        return self.all_gather(own).flatten(0, 1)[: len(x)]

    def captures(self, x: Tensor) -> bool:
        return self._nccl  # a CUDA graph captures NCCL calls after a warm-up has connected the ranks

    def lost(self, error: Exception) -> RankLost | None:
        return None  # a lost peer has raised RankLost already

    def close(self) -> None:
        """Leaves the group. The process may then join another group. NCCL waits for the other ranks, and for all CUDA
        graphs that contain its collectives to be freed."""
        dist.destroy_process_group()

    def abort(self) -> None:
        """Leaves a group of which a rank is lost or blocked, without waiting for the others."""
        if self._nccl:
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()


def sum_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which tensors like x are added."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def sum_in_rank_order(parts: Tensor, one: Tensor | None = None) -> Tensor:
    """Returns the sum of `parts` over its first dimension, the ranks. The result is bitwise identical on every rank.

    Adds in rank order in `sum_dtype`, and rounds once to the dtype of `parts`: one kernel per addition, since no
    operator of torch adds several tensors in a given order. `one`: [1], the number 1 in `sum_dtype`, if the caller
    keeps it.
    """
    if len(parts) == 1:
        return parts[0].clone()
    first, second, *others = parts.unbind(0)
    one = torch.ones(1, dtype=sum_dtype(parts), device=parts.device) if one is None else one
    out = torch.empty_like(first)
    if not others:
        return torch.addcmul(first, one, second, out=out)  # computes in the dtype of `one`, rounds to that of `out`
    total = torch.addcmul(first, one, second)
    for part in others[:-1]:
        total += part
    return torch.add(total, others[-1], out=out)


def _line(error: BaseException) -> str:
    """Returns torch's error message on one line, without source location and advice."""
    text = " ".join(str(error).split())
    line = re.sub(r"^\[[^\]]*\] ", "", text).partition(". ")[0] or type(error).__name__
    return f"{line}; {NCCL_SYSTEM_ADVICE}" if NCCL_SYSTEM_ERROR.search(text) else line


def nccl_version() -> str | None:
    """Returns the version of the NCCL that torch was built with; None without NCCL."""
    if not dist.is_nccl_available():
        return None
    from torch.cuda import nccl

    return ".".join(map(str, nccl.version()))
