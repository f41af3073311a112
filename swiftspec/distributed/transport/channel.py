"""Point-to-point channels between two ranks, of the same or of different groups.

No collective spans both groups, so a lost peer ends its own channel only. A receiver can block without limit; a
collective would run into its timeout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch.distributed.distributed_c10d import Store

from swiftspec.backends.cpu.shm import new_name
from swiftspec.distributed.transport.codec import Words
from swiftspec.distributed.transport.shm_channel import SharedMemoryChannel
from swiftspec.distributed.transport.tcp import Listener, connect


class Channel(Protocol):
    """Ordered messages of an opcode and 32-bit words. Every call raises ConnectionError once the peer is gone."""

    peer: str  # name of the peer in messages to the user

    def send(self, kind: int, words: Sequence[int] = ()) -> None:
        """Sends a message; returns before the peer has read it."""
        ...

    def recv(self, timeout: float | None = None) -> tuple[int, Words]:
        """Receives the next message; None blocks without limit. Raises TimeoutError; a later call can still succeed."""
        ...

    def recv_or_reply(self, reply: Any, asks: int, answers: int, note: int) -> tuple[int, Words, bool]:
        """Receives the next message and, if the channel can, replies to it in native code, before Python sees it.

        A message with opcode `asks` that `reply` matches is answered with a message of opcode `answers`, whose first
        word is `note`. The last value returned is whether that has happened.
        """
        ...

    def close(self) -> None: ...


def accept(store: Store, key: str, peer: str, *, host: str | None, spin: bool, timeout: float) -> Channel:
    """Opens a channel and blocks until a peer calls `dial` with the same key.

    `host`: this machine's address, or None if both ranks are on one machine and use shared memory.
    `spin`: whether a waiting rank may spin, because each rank of the machine has a core of its own.
    Raises OSError if the peer does not connect within `timeout` seconds.
    """
    if host is None:
        name = new_name()
        store.set(key, f"shared {name}")
        return SharedMemoryChannel(name, 0, peer, spin=spin, timeout=timeout)
    door = Listener(host)
    store.set(key, f"tcp {door.address}")
    return door.accept(peer, timeout)


def dial(store: Store, key: str, peer: str, *, spin: bool, timeout: float) -> Channel:
    """Connects to the rank that calls `accept` with the same key."""
    kind, _, where = store.get(key).decode().partition(" ")
    if kind == "shared":
        return SharedMemoryChannel(where, 1, peer, spin=spin, timeout=timeout)
    return connect(where, peer, timeout)
