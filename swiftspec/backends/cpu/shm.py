"""Collectives and a mailbox over shared memory, by the native LL protocol (csrc/common/ll.h).

One rank creates a name with `new_name` and sends it to the others; all open it together. Opening returns when all ranks
have joined; the name is then unlinked, so nothing outlives the processes. A waiting rank notices within a fraction of a
second that its peer has ended, even by SIGKILL. Errors: TimeoutError (deadline), ConnectionError (a peer has ended,
left or given up), other OSError (no shared memory).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

from torch import Tensor

from swiftspec import _C

ATTACH_TIMEOUT_S = 60.0


def new_name() -> str:
    """A random name for a group or a mailbox. It contains the process id, so that a supervisor can unlink the memory of
    a process that dies before all ranks have opened it."""
    return f"/swiftspec-{os.getpid()}-{secrets.token_hex(16)}"


class ShmCollectives:
    """Collectives of a tensor-parallel group. All ranks make the same calls in the same order, with the same shapes.

    `spin`: whether every rank of this machine has a core of its own; otherwise waiting ranks yield immediately.
    `timeout_s`: limit of each wait. After an exception every rank's calls raise. Not thread-safe.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        *,
        spin: bool,
        timeout_s: float = 30.0,
        capacity: int = 1 << 16,
        attach_timeout_s: float = ATTACH_TIMEOUT_S,
    ) -> None:
        """Opens the group. `capacity`: the longest message in bytes that is sent in one piece; the group takes
        4 `size`^2 times as much memory."""
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.native = _C.ShmGroup(name, rank, size, capacity, attach_timeout_s, spin)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in rank order and therefore bitwise identical on all ranks.

        float32, float64, or bfloat16 (summed in float32, rounded once). In place if `x` is contiguous; returns the sum.
        """
        x = x.contiguous()
        self.native.all_reduce(x, self.timeout_s)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Gathers `x` of every rank, in rank order: [size, *x.shape]. Any dtype."""
        out = x.new_empty(self.size, *x.shape)
        self.native.all_gather(x.contiguous(), out, self.timeout_s)
        return out

    def close(self) -> None:
        """Announces that this rank sends no more. Sent data stays readable."""
        self.native.leave()


class Mailbox:
    """Bidirectional channel of int32 messages between two processes, sides 0 and 1. Not thread-safe.

    `words`: capacity of one direction. Sending a message that fits returns immediately; a longer one is written while
    the other side reads it. `spin` as in ShmCollectives.
    """

    def __init__(
        self,
        name: str,
        side: int,
        *,
        spin: bool,
        timeout_s: float = 30.0,
        words: int = 1 << 16,
        attach_timeout_s: float = ATTACH_TIMEOUT_S,
    ) -> None:
        """Opens the mailbox. `timeout_s`: limit of a send into a full mailbox and of the waits within a message."""
        self.timeout_s = timeout_s
        self._mailbox = _C.Mailbox(name, side, words, attach_timeout_s, spin)

    def send(self, message: Sequence[int]) -> None:
        """Sends a message. Does not wait for the other side while there is space."""
        self._mailbox.send(message, self.timeout_s)

    def recv(self, timeout_s: float) -> list[int]:
        """Receives a message. Raises TimeoutError after `timeout_s` (0: polls once); the call may be repeated."""
        return self._mailbox.recv(timeout_s, self.timeout_s)

    def recv_or_reply(
        self, state: _C.FastReply, result: int, proposal: int, note: int, timeout_s: float
    ) -> tuple[list[int], bool]:
        """As `recv`, but immediately answers a message [result, ...] with [proposal, note, ...] if `state` has a reply
        (csrc/host/decoder/fast_reply.h). The second value is whether it did."""
        return self._mailbox.recv_or_reply(state, result, proposal, note, timeout_s, self.timeout_s)

    def close(self) -> None:
        """Announces that this side sends no more. Sent messages stay readable."""
        self._mailbox.leave()
