"""Peer memory among the GPUs of one machine, for groups that all-reduce in the kernels of their projections
(csrc/cuda/peers).

Every rank allocates an inbox in its GPU's memory and opens the inboxes of the others by CUDA IPC. An error word in
pinned memory, which all ranks can access, contains the reason why a rank has aborted.

Whether peer memory works is tried, since drivers report access that they do not grant (IPC handles that cannot be
opened) and links lose writes (PCIe with access control and an IOMMU).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

from swiftspec import _C
from swiftspec.backends.cpu.shm import new_name
from swiftspec.backends.cuda.linear import PeerCommunicator
from swiftspec.backends.cuda.torch_interop import use_current_device
from swiftspec.errors import UserError

MAX_PEERS = 8  # cuda::kMaxPeers
ATTACH_TIMEOUT_S = 60.0
PROBE_BYTES = 16  # of a message that tries a link
PROBE_TIMEOUT_S = 2.0  # seconds within which it must arrive

T = TypeVar("T")
Exchange = Callable[[str, bytes], list[bytes]]  # (topic, this rank's data) -> the data of all ranks, in rank order


class PeerAccessError(UserError):
    """Raised on all ranks of a group if its GPUs cannot all exchange data through each other's memory. A library has to
    all-reduce then."""


class PeerCollectives:
    """A rank's peer memory in a group of GPUs, and the `PeerCommunicator` over it.

    Construction is collective. If there are more than MAX_PEERS ranks, a rank cannot open another's memory, or what it
    writes there does not arrive, every rank raises PeerAccessError with the same message; so it does if the
    environment variable SWIFTSPEC_PEERS is 0 on one of them (csrc/cuda/peers/peers.cu). Every rank must have called
    `close` before any rank calls `free`.
    """

    def __init__(
        self, rank: int, size: int, lines: int, device: torch.device, exchange: Exchange, timeout_s: float
    ) -> None:
        """`lines`: LL lines of the longest product (`linear.max_lines`). `exchange`: all-gathers bytes over the ranks.
        `timeout_s`: seconds after which a waiting kernel aborts."""
        if size > MAX_PEERS:
            raise PeerAccessError(f"the CUDA operators all-reduce over at most {MAX_PEERS} GPUs, not {size}")
        self._rank, self._size, self._device, self._exchange = rank, size, device, exchange
        self._inbox: _C.CudaInbox | None = None
        self._peer_inboxes: dict[int, _C.CudaPeerInbox] = {}
        with torch.cuda.device(device):
            use_current_device()
            try:
                self._open_inboxes(lines)
                self._probe()
                self.communicator = self._agree("channel", lambda: self._make_communicator(lines, timeout_s))
            except PeerAccessError:
                self._peer_inboxes = {}
                exchange("closed", b"")
                self._inbox = None
                raise

    def _open_inboxes(self, lines: int) -> None:
        """Allocates this rank's inbox, opens those of the others and attaches the error word."""
        inbox = self._inbox = self._agree("inbox", lambda: _C.CudaInbox(_C.cuda_inbox_bytes(self._size, lines)))
        buses = [bus.decode() for bus in self._exchange("bus", self._agree("bus id", _C.cuda_bus_id).encode())]
        others = [peer for peer in range(self._size) if peer != self._rank]
        unreached = self._agree("reach", lambda: [peer for peer in others if not _C.cuda_reaches(buses[peer])])
        _check_peer_access(buses, unreached, self._exchange)
        handles = self._exchange("handle", self._agree("export", inbox.handle))
        self._peer_inboxes = self._agree("open", lambda: {peer: _C.CudaPeerInbox(handles[peer]) for peer in others})
        name = self._exchange("word", new_name().encode() if self._rank == 0 else b"")[0].decode()
        self._error_word = self._agree("pin", lambda: _C.CudaWord(name, self._rank, self._size, ATTACH_TIMEOUT_S))

    def _probe(self) -> None:
        """Writes a message to each peer's inbox and waits for those of the peers. Raises PeerAccessError on all ranks
        if one does not arrive within PROBE_TIMEOUT_S. The inboxes are zero again afterwards."""
        inbox = self._inbox
        assert inbox is not None

        def write() -> None:
            for peer, other in self._peer_inboxes.items():
                other.write(self._rank * PROBE_BYTES, _probe_message(self._rank, peer))

        def compare() -> None:
            until = time.monotonic() + PROBE_TIMEOUT_S
            try:
                for peer in self._peer_inboxes:
                    while inbox.read(peer * PROBE_BYTES, PROBE_BYTES) != _probe_message(peer, self._rank):
                        if time.monotonic() > until:
                            raise RuntimeError(f"what rank {peer} writes to its GPU memory does not arrive")
                        time.sleep(0.001)
            finally:
                inbox.clear()  # every rank has written, so nothing arrives after this

        self._agree("written", write)
        self._agree("arrived", compare)

    def _make_communicator(self, lines: int, timeout_s: float) -> PeerCommunicator:
        assert self._inbox is not None
        inboxes = [self._peer_inboxes.get(peer, self._inbox).address for peer in range(self._size)]
        error_word = torch.frombuffer(self._error_word.view(), dtype=torch.int64)
        return PeerCommunicator(self._rank, inboxes, lines, error_word, self._device, timeout_s)

    def _agree(self, step: str, attempt: Callable[[], T]) -> T:
        """Returns the result of `attempt`. If it fails on some ranks, all ranks raise PeerAccessError with the reason
        of the first of them. `step`: name of the exchange."""
        found: list[T] = []
        reason = ""
        try:
            found.append(attempt())
        except (OSError, RuntimeError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
        for rank, problem in enumerate(self._exchange(step, reason.encode())):
            if problem:
                found.clear()  # memory that the traceback would otherwise keep open
                raise PeerAccessError(f"GPU rank {rank}: {problem.decode()}")
        return found[0]

    def close(self) -> None:
        """Waits until all kernels of this rank have ended, then unmaps the other ranks' memory."""
        with suppress(RuntimeError):  # a lost device runs no kernels
            torch.cuda.synchronize(self._device)
        self._peer_inboxes = {}

    def free(self) -> None:
        """Frees this rank's memory; call it after all other ranks have closed."""
        self._inbox = None


def _check_peer_access(buses: list[str], unreached: list[int], exchange: Exchange) -> None:
    """Raises the same PeerAccessError on all ranks if one GPU cannot access the memory of another. `unreached`: ranks
    whose GPU this rank's cannot access."""
    for other, found in enumerate(exchange("unreached", json.dumps(unreached).encode())):
        for peer in json.loads(found):
            pair = f"GPU {buses[other]} of rank {other} cannot access GPU {buses[peer]} of rank {peer}"
            raise PeerAccessError(f"{pair} in its group")


def _probe_message(writer: int, reader: int) -> bytes:
    """Returns the message of one rank to another: no byte is zero, and every pair has another one."""
    return bytes([0xA0 + writer, 0xB0 + reader] * (PROBE_BYTES // 2))
