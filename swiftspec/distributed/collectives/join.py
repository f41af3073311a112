"""Joins a tensor-parallel group over the fastest interconnect that its ranks share."""

from __future__ import annotations

from datetime import timedelta

import torch

from swiftspec.distributed.collectives import peers
from swiftspec.distributed.collectives.peers import PeerMemoryGroup
from swiftspec.distributed.collectives.shm import SharedMemoryGroup
from swiftspec.distributed.collectives.torch_dist import TorchDistGroup
from swiftspec.distributed.launch.network_interface import select_gloo_interface
from swiftspec.distributed.launch.world import World
from swiftspec.runtime.current_device import set_current_device

COLLECTIVE_TIMEOUT = timedelta(seconds=30)  # longest wait for a blocked peer; one that has exited is detected earlier
RankGroup = TorchDistGroup | PeerMemoryGroup | SharedMemoryGroup


def end_startup(group: RankGroup | None) -> None:
    """Called after the first round: from then on a rank that is late for `peers.PEER_TIMEOUT_S` counts as lost."""
    if isinstance(group, PeerMemoryGroup):
        group.end_startup()


def count_exchanges(group: RankGroup | None) -> int:
    """Returns how often the kernels of a group have exchanged data, which must be equal on all ranks; 0 for groups that
    do not count."""
    return group.exchanges if isinstance(group, PeerMemoryGroup) else 0


def join_group(
    world: World, name: str, rank: int, size: int, *, device: torch.device, share_device: bool, width: int
) -> RankGroup:
    """Joins group `name` as rank `rank` of `size` and returns the group. Raises RankLost if a rank does not join.

    `share_device`: whether several ranks may use one GPU, which excludes NCCL and peer memory.
    `width`: largest output size of a projection whose kernel all-reduces through peer memory; 0 if there is no such
    projection.
    """
    store, timeout = world.store, COLLECTIVE_TIMEOUT
    if world.one_machine and device.type == "cpu":
        return SharedMemoryGroup.join(store, name, rank, size, spin=world.spin, timeout=timeout)
    if not world.one_machine:
        select_gloo_interface(world.host)
    set_current_device(device)  # NCCL uses the current device
    if device.type == "cuda" and not share_device:
        width = width if world.one_machine else 0
        return peers.join(store, name, rank, size, device=device, timeout=timeout, width=width, log=world.log)
    return TorchDistGroup.join(store, name, rank, size, device=device, timeout=timeout, share_device=share_device)
