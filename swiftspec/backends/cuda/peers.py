"""Peer memory among the GPUs of one machine, for groups that all-reduce in the kernels of their projections
(csrc/cuda/peers).

Every rank allocates an inbox in its GPU's memory and opens the inboxes of the others by CUDA IPC. An error word in
pinned memory, which all ranks can access, contains the reason why a rank has aborted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress

import torch

from swiftspec import _C
from swiftspec.backends.cpu.shm import new_name
from swiftspec.backends.cuda.linear import PeerCommunicator
from swiftspec.backends.cuda.torch_interop import use_current_device
from swiftspec.errors import UserError

MAX_PEERS = 8  # cuda::kMaxPeers
ATTACH_TIMEOUT_S = 60.0

Exchange = Callable[[str, bytes], list[bytes]]  # (topic, this rank's data) -> the data of all ranks, in rank order


class PeerAccessError(UserError):
    """Raised if the GPUs of a group cannot all access each other's memory, so that a library has to all-reduce."""


class PeerCollectives:
    """A rank's peer memory in a group of GPUs, and the `PeerCommunicator` over it.

    Construction is collective. If there are more than MAX_PEERS ranks, or a GPU cannot access another's memory, every
    rank raises PeerAccessError. Every rank must have called `close` before any rank calls `free`.
    """

    def __init__(
        self, rank: int, size: int, lines: int, device: torch.device, exchange: Exchange, timeout_s: float
    ) -> None:
        """`lines`: LL lines of the longest product (`linear.max_lines`). `exchange`: all-gathers bytes over the ranks.
        `timeout_s`: seconds after which a waiting kernel aborts."""
        if size > MAX_PEERS:
            raise PeerAccessError(f"the CUDA operators all-reduce over at most {MAX_PEERS} GPUs, not {size}")
        self._device = device
        with torch.cuda.device(device):
            use_current_device()
            self._inbox: _C.CudaInbox | None = _C.CudaInbox(_C.cuda_inbox_bytes(size, lines))
            buses = [bus.decode() for bus in exchange("bus", _C.cuda_bus_id().encode())]
            _check_peer_access(rank, buses, exchange)
            handles = exchange("handle", self._inbox.handle())
            name = exchange("word", new_name().encode() if rank == 0 else b"")[0].decode()
            others = {peer: _C.CudaPeerInbox(handle) for peer, handle in enumerate(handles) if peer != rank}
            self._peer_inboxes: dict[int, _C.CudaPeerInbox] = others
            self._error_word = _C.CudaWord(name, rank, size, ATTACH_TIMEOUT_S)
            error_word = torch.frombuffer(self._error_word.view(), dtype=torch.int64)
            inboxes = [others[peer].address if peer != rank else self._inbox.address for peer in range(size)]
            self.communicator = PeerCommunicator(rank, inboxes, lines, error_word, device, timeout_s)

    def close(self) -> None:
        """Waits until all kernels of this rank have ended, then unmaps the other ranks' memory."""
        with suppress(RuntimeError):  # a lost device runs no kernels
            torch.cuda.synchronize(self._device)
        self._peer_inboxes = {}

    def free(self) -> None:
        """Frees this rank's memory; call it after all other ranks have closed."""
        self._inbox = None


def _check_peer_access(rank: int, buses: list[str], exchange: Exchange) -> None:
    """Raises the same PeerAccessError on all ranks if one GPU cannot access the memory of another."""
    unreached = [peer for peer, bus in enumerate(buses) if peer != rank and not _C.cuda_reaches(bus)]
    for other, found in enumerate(exchange("unreached", json.dumps(unreached).encode())):
        for peer in json.loads(found):
            pair = f"GPU {buses[other]} of rank {other} cannot access GPU {buses[peer]} of rank {peer}"
            raise PeerAccessError(f"{pair} in its group")
