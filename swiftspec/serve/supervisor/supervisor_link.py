"""How the keepers of one machine that a launcher has started hear that rank 0's has ended: a launcher whose job went
well waits for all of them."""

from __future__ import annotations

import hashlib
import os
import socket
import struct
from contextlib import suppress
from typing import Protocol

from swiftspec.distributed.launch.launcher import Launched

BACKLOG = 128


class Link(Protocol):
    """One keeper's end, which never waits."""

    def look(self) -> int | None:
        """The exit code of rank 0's keeper, once that has ended; 1 where it did not say. Asked now and then."""
        ...

    def close(self, code: int) -> None:
        """This keeper ends with that code."""
        ...


class Leading:
    """Of rank 0. Does nothing where the name is taken: then another job has the port, which rank 0 finds itself."""

    def __init__(self, name: bytes) -> None:
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.setblocking(False)
        self._followers: list[socket.socket] = []
        with suppress(OSError):
            self._listening.bind(name)
            self._listening.listen(BACKLOG)

    def look(self) -> int | None:
        with suppress(OSError):
            while True:
                follower = self._listening.accept()[0]
                if is_ours(follower):
                    self._followers.append(follower)
                else:
                    follower.close()

    def close(self, code: int) -> None:
        self.look()
        for follower in self._followers:
            with suppress(OSError):
                follower.send(bytes([code]))
            follower.close()
        self._listening.close()


class Following:
    """Of any other rank."""

    def __init__(self, name: bytes) -> None:
        self._name = name
        self._leader: socket.socket | None = None

    def look(self) -> int | None:
        if self._leader is None:
            self._connect()
        if self._leader is None:
            return None
        try:
            data = self._leader.recv(1)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        return data[0] if data else 1

    def close(self, code: int) -> None:
        if self._leader is not None:
            self._leader.close()

    def _connect(self) -> None:
        leader = socket.socket(socket.AF_UNIX)
        leader.setblocking(False)
        try:
            leader.connect(self._name)
            found = is_ours(leader)
        except OSError:  # it is not there yet, or on another machine
            found = False
        if found:
            self._leader = leader
        else:
            leader.close()


def is_ours(peer: socket.socket) -> bool:
    """Whether the process at the other end is the same user's: the name alone protects nothing."""
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return user == os.getuid()


def link(here: Launched) -> Link:
    """This keeper's end. No file has the name: it ends with the processes."""
    job = f"{os.getuid()} {here.host} {here.port} {here.size} {here.attempt}"
    name = b"\0swiftspec-" + hashlib.sha256(job.encode()).hexdigest()[:32].encode()
    return Leading(name) if here.rank == 0 else Following(name)
