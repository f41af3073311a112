"""Joins the ranks of one model, over the fastest wire that they have."""

from __future__ import annotations

from datetime import timedelta

import torch

from swiftspec.distributed.collectives import peers
from swiftspec.distributed.collectives.peers import PeerMemoryGroup
from swiftspec.distributed.collectives.shm import SharedMemoryGroup
from swiftspec.distributed.collectives.torch_dist import TorchDistGroup
from swiftspec.distributed.launch.world import World

COLLECTIVE_TIMEOUT = timedelta(seconds=30)  # a peer this late inside a forward hangs; one that dies is found at once
RankGroup = TorchDistGroup | PeerMemoryGroup | SharedMemoryGroup


def join_group(
    world: World, name: str, rank: int, size: int, *, device: torch.device, share_device: bool, width: int
) -> RankGroup:
    """This rank's group. `share_device`: several ranks may be on one GPU; `width`: of
    the widest product that kernels of the group sum over peer memory; 0: they sum none."""
    store, timeout = world.store, COLLECTIVE_TIMEOUT
    if world.one_machine and device.type == "cpu":
        return SharedMemoryGroup.join(store, name, rank, size, spin=world.spin, timeout=timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # what NCCL goes by
    if device.type == "cuda" and not share_device:
        width = width if world.one_machine else 0
        return peers.join(store, name, rank, size, device=device, timeout=timeout, width=width)
    return TorchDistGroup.join(store, name, rank, size, device=device, timeout=timeout, share_device=share_device)
