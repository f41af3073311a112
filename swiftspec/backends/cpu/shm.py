"""Collectives and a mailbox over shared memory, by the native LL protocol (csrc/common/ll.h).

One rank creates a name with `new_name` and sends it to the others. All ranks then construct the object with this name;
the constructor returns when all have joined. The name is then unlinked, so no memory outlives the processes. A waiting
rank detects within a fraction of a second that its peer has ended, even by SIGKILL. Constructors and methods raise
TimeoutError at a deadline, ConnectionError if a peer has ended, left or given up, and another OSError if there is no
shared memory.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

from torch import Tensor

from swiftspec import _C

ATTACH_TIMEOUT_S = 60.0


def new_name() -> str:
    """Returns a random name for a group or a mailbox. It contains the process id, so that a supervisor can unlink the
    memory of a process that dies before all ranks have opened it."""
    return f"/swiftspec-{os.getpid()}-{secrets.token_hex(16)}"


class ShmCollectives:
    """Collectives of a tensor-parallel group. All ranks make the same calls in the same order, with the same shapes.

    `spin`: waiting ranks spin; set it only if every rank of this machine has a core of its own. Otherwise waiting ranks
    yield immediately. `timeout_s`: limit of each wait. After an exception, all further calls raise on every rank. Not
    thread-safe.
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
        """Joins the group; blocks until all ranks have joined, for at most `attach_timeout_s`. `capacity`: bytes of the
        longest message that is sent in one piece; the group allocates 4 * `size`^2 * `capacity` bytes."""
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.native = _C.ShmGroup(name, rank, size, capacity, attach_timeout_s, spin)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of `x` over the ranks, added in rank order and therefore bitwise identical on all ranks.

        `x` is float32, float64 or bfloat16 (summed in float32, rounded once). The sum overwrites `x` if that is
        contiguous.
        """
        x = x.contiguous()
        self.native.all_reduce(x, self.timeout_s)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Returns `x` of every rank, in rank order: [size, *x.shape]. Any dtype."""
        out = x.new_empty(self.size, *x.shape)
        self.native.all_gather(x.contiguous(), out, self.timeout_s)
        return out

    def close(self) -> None:
        """Announces that this rank sends no more. Sent data stays readable."""
        self.native.leave()


class Mailbox:
    """Bidirectional channel of int32 messages between two processes, sides 0 and 1. Not thread-safe.

    `words`: capacity of one direction, in int32. Sending a message that fits returns immediately; a longer message is
    written while the other side reads it. `spin`: see ShmCollectives.
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
        """Opens the mailbox; blocks until the other side has opened it, for at most `attach_timeout_s`. `timeout_s`:
        limit of a send into a full mailbox, and of waiting for the rest of a message that has begun to arrive."""
        self.timeout_s = timeout_s
        self._mailbox = _C.Mailbox(name, side, words, attach_timeout_s, spin)

    def send(self, message: Sequence[int]) -> None:
        """Sends a message. Blocks only while the mailbox is full; raises TimeoutError after the mailbox's
        `timeout_s`."""
        self._mailbox.send(message, self.timeout_s)

    def recv(self, timeout_s: float) -> list[int]:
        """Receives a message. Raises TimeoutError if none arrives within `timeout_s` (0: polls once); the call may then
        be repeated."""
        return self._mailbox.recv(timeout_s, self.timeout_s)

    def recv_or_reply(
        self, state: _C.FastReply, result: int, proposal: int, note: int, timeout_s: float
    ) -> tuple[list[int], bool]:
        """Receives a message as `recv` does, and replies without Python code if possible.

        If the message begins with the opcode `result` and `state` computes a reply to it
        (csrc/host/decoder/fast_reply.h), sends [proposal, note, *reply] immediately. Returns the message, and whether a
        reply was sent. `proposal`: opcode of the reply. `note`: a number for the receiver.
        """
        return self._mailbox.recv_or_reply(state, result, proposal, note, timeout_s, self.timeout_s)

    def close(self) -> None:
        """Announces that this side sends no more. Sent messages stay readable."""
        self._mailbox.leave()
