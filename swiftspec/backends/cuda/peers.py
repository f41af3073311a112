"""Peer memory among the GPUs of one machine, for groups whose projections sum in their own kernels (csrc/cuda/peers).

Every rank makes its inbox, a piece of its GPU's memory, and opens the others' by CUDA IPC; one word of pinned memory,
which all of them see, says why somebody gave up.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress

import torch

from swiftspec import _C
from swiftspec.backends.cpu.shm import new_name
from swiftspec.backends.cuda.checks import use_current_device
from swiftspec.backends.cuda.linear import PeerCommunicator
from swiftspec.errors import UserError

MAX_PEERS = 8  # cuda::kMaxPeers
ATTACH_TIMEOUT_S = 60.0

Exchange = Callable[[str, bytes], list[bytes]]  # what this rank says of a topic -> what every rank says, in rank order


class PeerAccessError(UserError):
    """The GPUs of a group cannot all reach each other's memory: their sums are a library's."""


class PeerGroup:
    """One rank's end of a group of GPUs: memory that the others reach, and the `Communicator` over it.

    All ranks make it together, and all of them fail where one does. Raises Unreached on all of them where there are
    more ranks than peers can be, or some GPU cannot reach another. To be closed by all before any of them frees its
    memory: `close`, all have closed, `free`.
    """

    def __init__(
        self, rank: int, size: int, lines: int, device: torch.device, exchange: Exchange, timeout_s: float
    ) -> None:
        """`lines`: of the longest product; `patience` in seconds: a kernel that waits longer ends itself."""
        if size > MAX_PEERS:
            raise PeerAccessError(f"the CUDA operators sum over at most {MAX_PEERS} GPUs, not {size}")
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
            trouble = torch.frombuffer(self._error_word.view(), dtype=torch.int64)
            inboxes = [others[peer].address if peer != rank else self._inbox.address for peer in range(size)]
            self.communicator = PeerCommunicator(rank, inboxes, lines, trouble, device, timeout_s)

    def close(self) -> None:
        """Lets go of the others' memory, once no kernel of this rank runs any more."""
        with suppress(RuntimeError):  # of a device that is lost, on which none does
            torch.cuda.synchronize(self._device)
        self._peer_inboxes = {}

    def free(self) -> None:
        """Frees this rank's memory, which nobody may have open any more."""
        self._inbox = None


def _check_peer_access(rank: int, buses: list[str], exchange: Exchange) -> None:
    """Raises the same Unreached on all ranks where some GPU cannot reach another."""
    unreached = [peer for peer, bus in enumerate(buses) if peer != rank and not _C.cuda_reaches(bus)]
    for other, found in enumerate(exchange("unreached", json.dumps(unreached).encode())):
        for peer in json.loads(found):
            pair = f"GPU {buses[other]} of rank {other} cannot reach GPU {buses[peer]} of rank {peer}"
            raise PeerAccessError(f"{pair} of its group")
