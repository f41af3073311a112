"""Connection between the supervisors that a launcher has started on one machine. It carries the exit code of rank 0's
supervisor, with which the others exit too: a launcher waits for all of them."""

from __future__ import annotations

import hashlib
import os
import socket
import struct
from contextlib import suppress
from typing import Protocol

from swiftspec.distributed.launch.launched_rank import LaunchedRank

BACKLOG_CONNECTIONS = 128


class JobLink(Protocol):
    """One supervisor's end of the connection. No method blocks."""

    def poll_exit_code(self) -> int | None:
        """Returns the exit code of rank 0's supervisor once it has exited (1 if it sent none); None before that, and on
        rank 0."""
        ...

    def close(self, code: int) -> None:
        """Closes the connection. On rank 0, sends the exit code `code` first."""
        ...


class LeaderJobLink:
    """End of rank 0's supervisor. If the socket name is in use, another job has the same port: no supervisor can
    connect then, and rank 0 reports the error."""

    def __init__(self, name: bytes) -> None:
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.setblocking(False)
        self._followers: list[socket.socket] = []
        with suppress(OSError):
            self._listening.bind(name)
            self._listening.listen(BACKLOG_CONNECTIONS)

    def poll_exit_code(self) -> int | None:
        with suppress(OSError):
            while True:
                follower = self._listening.accept()[0]
                if same_user(follower):
                    self._followers.append(follower)
                else:
                    follower.close()

    def close(self, code: int) -> None:
        self.poll_exit_code()
        for follower in self._followers:
            with suppress(OSError):
                follower.send(bytes([code]))
            follower.close()
        self._listening.close()


class FollowerJobLink:
    """End of any other rank's supervisor."""

    def __init__(self, name: bytes) -> None:
        self._name = name
        self._leader: socket.socket | None = None

    def poll_exit_code(self) -> int | None:
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
            connected = same_user(leader)
        except OSError:  # not started yet, or on another machine
            connected = False
        if connected:
            self._leader = leader
        else:
            leader.close()


def same_user(peer: socket.socket) -> bool:
    """Returns whether the process at the other end belongs to the same user. Any user can connect to an abstract socket
    name."""
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return user == os.getuid()


def job_link(launched: LaunchedRank) -> JobLink:
    """Creates this supervisor's end of the connection. The socket name is abstract, so it disappears with the
    processes."""
    job = f"{os.getuid()} {launched.host} {launched.port} {launched.size} {launched.attempt}"
    name = b"\0swiftspec-" + hashlib.sha256(job.encode()).hexdigest()[:32].encode()
    return LeaderJobLink(name) if launched.rank == 0 else FollowerJobLink(name)
