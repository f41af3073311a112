"""Joins the ranks of one model, over the fastest wire that they have."""

from __future__ import annotations

from datetime import timedelta

import torch

from swiftspec.distributed.collectives import peers
from swiftspec.distributed.collectives.peers import PeerParallel
from swiftspec.distributed.collectives.shm import SharedParallel
from swiftspec.distributed.collectives.torch_dist import TensorParallel
from swiftspec.distributed.launch.world import World

COLLECTIVE_TIMEOUT = timedelta(seconds=30)  # a peer this late inside a forward hangs; one that dies is found at once
AnyGroup = TensorParallel | PeerParallel | SharedParallel


def join_group(
    world: World, name: str, rank: int, size: int, *, device: torch.device, share_device: bool, width: int
) -> AnyGroup:
    """This rank's group. `share_device`: several ranks may be on one GPU; `width`: of
    the widest product that kernels of the group sum over peer memory; 0: they sum none."""
    store, timeout = world.store, COLLECTIVE_TIMEOUT
    if world.one_machine and device.type == "cpu":
        return SharedParallel.join(store, name, rank, size, spin=world.spin, timeout=timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # what NCCL goes by
    if device.type == "cuda" and not share_device:
        width = width if world.one_machine else 0
        return peers.join(store, name, rank, size, device=device, timeout=timeout, width=width)
    return TensorParallel.join(store, name, rank, size, device=device, timeout=timeout, share_device=share_device)
