"""A stream of flat messages between two ranks: the bridge between groups, and a leader's word to its followers.

Point to point, so that nothing spans both groups: a peer that is gone is the end of this stream and of nothing else. An
idle receiver waits as long as it likes, which a collective with its timeout could not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch.distributed.distributed_c10d import Store

from swiftspec.backends.cpu.shm import new_name
from swiftspec.distributed.transport.codec import Words
from swiftspec.distributed.transport.mailbox import SharedMemoryChannel
from swiftspec.distributed.transport.tcp import Listener, connect


class Channel(Protocol):
    """Messages of a kind and 32-bit words, in order. Raises ConnectionError once the peer is gone."""

    peer: str  # who that is, for people

    def send(self, kind: int, words: Sequence[int] = ()) -> None:
        """Hands a message over; returns before it is read."""
        ...

    def recv(self, timeout: float | None = None) -> tuple[int, Words]:
        """The next message; None waits for ever. Raises TimeoutError, after which waiting again is fine."""
        ...

    def recv_or_reply(self, reply: Any, asks: int, answers: int, note: int) -> tuple[int, Words, bool]:
        """The next message. One of the kind `asks` is replied to as it arrives, without Python, if this wire can do
        that and the reply is for it: by a message of the kind `answers` whose first word is `note`. The last value:
        whether it was."""
        ...

    def close(self) -> None: ...


def accept(store: Store, key: str, peer: str, *, host: str | None, spin: bool, timeout: float) -> Channel:
    """Waits for `dial` with the same key. `host`: this machine's address; None where both are on one machine, and then
    `spin` says whether each of its ranks has a core. Raises OSError when nobody comes."""
    if host is None:
        name = new_name()
        store.set(key, f"shared {name}")
        return SharedMemoryChannel(name, 0, peer, spin=spin, timeout=timeout)
    door = Listener(host)
    store.set(key, f"tcp {door.address}")
    return door.accept(peer, timeout)


def dial(store: Store, key: str, peer: str, *, spin: bool, timeout: float) -> Channel:
    """The other end of `accept`."""
    kind, _, where = store.get(key).decode().partition(" ")
    if kind == "shared":
        return SharedMemoryChannel(where, 1, peer, spin=spin, timeout=timeout)
    return connect(where, peer, timeout)
