"""Messages of torch.distributed, in one line."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from swiftspec.distributed.collectives import torch_dist
from swiftspec.distributed.collectives.torch_dist import TorchDistGroup
from swiftspec.errors import RankLost

SYSTEM_ERROR = (
    "[../torch/csrc/distributed/c10d/NCCLUtils.hpp:317] NCCL error in: ProcessGroupNCCL.cpp:5021, unhandled system"
    " error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28\nncclSystemError: System call (e.g. socket,"
    " malloc) or external library call failed or device error."
)


@pytest.mark.parametrize(("error", "advises"), [(SYSTEM_ERROR, True), ("Connection closed by peer [1]. See", False)])
def test_a_small_shared_memory_is_named(monkeypatch: pytest.MonkeyPatch, error: str, advises: bool) -> None:
    """NCCL reports it as an unhandled system error. Docker's default of 64 MB is too small."""

    def fail(*args: object) -> None:
        raise RuntimeError(error)

    monkeypatch.setattr(torch_dist, "gather_into_tensor", fail)
    with pytest.raises(RankLost) as lost:
        TorchDistGroup("target", 0, 2, nccl=True).all_gather(torch.zeros(2))
    assert "\n" not in str(lost.value) and ("--shm-size=1g or --ipc=host" in str(lost.value)) == advises


def test_nccl_connects_the_ranks_when_they_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the first long prompt, on a group whose short messages use peer memory."""
    zeros, gathered = torch.zeros, list[int]()
    monkeypatch.setattr(torch, "zeros", lambda count, device: zeros(count))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(torch_dist, "gather_into_tensor", lambda parts, x: gathered.append(len(parts)))
    wanted: Any = {"timeout": timedelta(seconds=1)}
    for device in ("cuda:1", "cpu"):
        TorchDistGroup.join(HashStore(), "target", 0, 3, device=device, **wanted)
    assert gathered == [3]


def test_a_group_that_lost_a_rank_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo cannot be aborted, but does not wait for the other ranks."""
    calls: list[str] = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroy"))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: calls.append("abort"))
    for nccl in (True, False):
        TorchDistGroup("target", 0, 2, nccl).abort()
    assert calls == ["abort", "destroy"]
