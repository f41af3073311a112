"""Point-to-point transports between two ranks, of the same group or of different groups, or between a worker and its
client. Implemented by `ShmTransport`, `TcpTransport` and `GrpcTransport`.

Target group and draft group exchange messages through a transport, not by a collective: a lost peer ends only its own
transport, and a receiver can block without limit, where a collective would run into its timeout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch.distributed.distributed_c10d import Store

from swiftspec.backends.cpu.shm import new_name
from swiftspec.distributed.transport.codec import Frame, Words
from swiftspec.distributed.transport.shm import ShmTransport
from swiftspec.distributed.transport.tcp import Listener, connect


class Receiver(Protocol):
    """Receiving end of ordered messages, each an opcode and a list of 32-bit words. Every call raises ConnectionError
    once the peer is gone."""

    peer: str  # name of the peer in messages to the user

    def recv(self, timeout: float | None = None) -> Frame:
        """Returns opcode and words of the next message. Raises TimeoutError if it does not arrive within `timeout`
        seconds (None: no limit); the call can then be repeated."""
        ...


class Transport(Receiver, Protocol):
    """Bidirectional transport of ordered messages."""

    def send(self, kind: int, words: Sequence[int] = ()) -> None:
        """Sends a message with opcode `kind`; returns before the peer has read it."""
        ...

    def recv_or_reply(self, reply: Any, asks: int, answers: int, note: int) -> tuple[int, Words, bool]:
        """Returns opcode and words of the next message, and whether native code has replied to it already.

        `reply`: native object returned by `LocalDrafter.fast_reply`, which computes a reply or leaves the message to
        Python.
        `asks`: opcode of the messages that may be replied to.
        `answers`: opcode of a reply. `note`: first word of a reply.
        A transport without native code never replies.
        """
        ...

    def restart(self) -> None:
        """Called before a request starts. A transport with one stream per request cancels the stream of the previous
        request, and opens another one for the next message. On other transports, messages about earlier requests may
        still arrive."""
        ...

    def close(self) -> None: ...


def accept(store: Store, key: str, peer: str, *, host: str | None, spin: bool, timeout: float) -> Transport:
    """Opens a transport and blocks until the peer calls `dial` with the same key.

    `peer`: name of the peer in messages to the user.
    `host`: this machine's address, or None if both ranks are on one machine and use shared memory.
    `spin`: whether a rank that waits at shared memory busy-waits, for which every rank of the machine must have its own
    core.
    Raises OSError if the peer does not connect within `timeout` seconds.
    """
    if host is None:
        name = new_name()
        store.set(key, f"shared {name}")
        return ShmTransport(name, 0, peer, spin=spin, timeout=timeout)
    listener = Listener(host)
    store.set(key, f"tcp {listener.address}")
    return listener.accept(peer, timeout)


def dial(store: Store, key: str, peer: str, *, spin: bool, timeout: float) -> Transport:
    """Opens a transport to the rank that calls `accept` with the same key. Other parameters are those of `accept`.

    Raises OSError if the connection fails or takes longer than `timeout` seconds, and RuntimeError if the other rank
    does not call `accept` within the timeout of `store`.
    """
    kind, _, where = store.get(key).decode().partition(" ")
    if kind == "shared":
        return ShmTransport(where, 1, peer, spin=spin, timeout=timeout)
    return connect(where, peer, timeout)
