"""Ranks of one machine over shared memory, by the native LL protocol (csrc/common/ll.h): collectives and a mailbox.

One rank makes a name with `new_name`, sends it to the others by whatever they started with, and all open it together;
opening returns when all are there, and from then on the name is gone and nothing outlives the processes. A rank that
ends, even by SIGKILL, is noticed within a fraction of a second by whoever waits for it. Errors are Python's own:
TimeoutError (a deadline), ConnectionError (a peer has ended, left or given up), other OSError (no shared memory).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

from torch import Tensor

from swiftspec import _C

ATTACH_SECONDS = 60.0


def new_name() -> str:
    """A name for a group or a mailbox that nobody guesses or has used. It says whose it is, so that a keeper can take
    away what a process leaves that dies before all have opened it."""
    return f"/swiftspec-{os.getpid()}-{secrets.token_hex(16)}"


class SharedGroup:
    """The ranks of a tensor-parallel group. All make the same calls in the same order, with the same shapes.

    `spin`: every rank of this machine has a core of its own. Without it a waiting rank gives its core away at once.
    `timeout` (seconds) bounds each wait. Once a call has raised, every rank's calls raise. Used by one thread.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        *,
        spin: bool,
        timeout: float = 30.0,
        capacity: int = 1 << 16,
        attach_timeout: float = ATTACH_SECONDS,
    ) -> None:
        """Opens the group. `capacity` is the longest message, in bytes, that goes in one piece; memory is 4 `size`^2
        times that."""
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.native = _C.Group(name, rank, size, capacity, attach_timeout, spin)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in their order and so bitwise equal on all: float32, float64, or bfloat16 (summed in
        float32, rounded once). In place where `x` is contiguous; returns the sum."""
        x = x.contiguous()
        self.native.all_reduce(x, self.timeout)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape]: `x` of every rank, in their order. Any dtype."""
        out = x.new_empty(self.size, *x.shape)
        self.native.all_gather(x.contiguous(), out, self.timeout)
        return out

    def close(self) -> None:
        """Tells the others that nothing more will come from this rank; what it has sent stays readable."""
        self.native.leave()


class Mailbox:
    """Messages of 32-bit words between two processes, in both directions; sides 0 and 1. Used by one thread.

    `words`: what fits unread in one direction. A message that fits is sent at once; a longer one passes as the other
    side reads it. `spin` as in SharedGroup.
    """

    def __init__(
        self,
        name: str,
        side: int,
        *,
        spin: bool,
        timeout: float = 30.0,
        words: int = 1 << 16,
        attach_timeout: float = ATTACH_SECONDS,
    ) -> None:
        """Opens the mailbox. `timeout` (seconds) bounds a send into a full mailbox and the pauses within a message."""
        self.timeout = timeout
        self._mailbox = _C.Mailbox(name, side, words, attach_timeout, spin)

    def send(self, message: Sequence[int]) -> None:
        """Sends [n] words; does not wait for the other side as long as there is room."""
        self._mailbox.send(message, self.timeout)

    def recv(self, timeout: float) -> list[int]:
        """The next message. TimeoutError after `timeout` seconds (0: only a look); it may be tried again."""
        return self._mailbox.recv(timeout, self.timeout)

    def recv_or_reply(
        self, ready: _C.FastReply, result: int, proposal: int, note: int, timeout: float
    ) -> tuple[list[int], bool]:
        """As `recv`. A message [result, ...] is replied to at once where `ready` can: [proposal, note, ...]
        (csrc/host/decoder/fast_reply.h). The second value: whether it was."""
        return self._mailbox.recv_or_reply(ready, result, proposal, note, timeout, self.timeout)

    def close(self) -> None:
        """Tells the other side that nothing more will come; what was sent stays readable."""
        self._mailbox.leave()
