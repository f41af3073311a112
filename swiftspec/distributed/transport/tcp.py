"""A channel over TCP, between machines or where there is no shared memory."""

from __future__ import annotations

import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from swiftspec.distributed.transport.codec import Words

HEADER = struct.Struct("=II")  # kind, count of words
MAX_WORDS = 1 << 24  # 64 MiB: far beyond any prompt, so more is a broken stream
MIN_POLL_S = 1e-3  # seconds that a look without waiting takes
AUTH_TIMEOUT_S = 2.0  # seconds that who calls has to show its ticket; meanwhile nobody else gets in
SEND_TIMEOUT_S = 30.0  # seconds; only a peer that reads nothing for so long makes a sender wait


class TcpChannel:
    """A `Channel` over a socket. After an exception in the middle of a message it is of no more use, and says so."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.peer = peer
        self._sock = sock
        self._buffer = bytearray()
        self._usable = True

    def send(self, kind: int, words: Sequence[int] = ()) -> None:
        """Hands a message over; returns before it is read."""
        data = HEADER.pack(kind, len(words)) + np.array(words, np.int32).tobytes()
        self._sock.settimeout(SEND_TIMEOUT_S)
        self._checked_io(lambda: self._sock.sendall(data))

    def recv(self, timeout: float | None = None) -> tuple[int, Words]:
        """The next message; None waits for ever. Raises TimeoutError, after which waiting again is fine."""
        deadline = None if timeout is None else time.monotonic() + timeout
        looked = False
        while (message := self._pop_message()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if looked and left is not None and left <= 0:
                raise TimeoutError(f"no message from {self.peer} within {timeout:g} s")
            self._sock.settimeout(None if left is None else max(left, MIN_POLL_S))
            self._checked_io(self._read)
            looked = True
        return message

    def recv_or_reply(self, reply: Any, asks: int, answers: int, note: int) -> tuple[int, Words, bool]:
        """As `recv`: this wire replies to nothing by itself."""
        return *self.recv(), False

    def close(self) -> None:
        self._usable = False
        self._sock.close()

    def _read(self) -> None:
        try:
            data = self._sock.recv(1 << 16)
        except TimeoutError:
            return
        if not data:
            raise ConnectionError(f"{self.peer} is gone")
        self._buffer += data

    def _pop_message(self) -> tuple[int, Words] | None:
        """Takes the first message from the buffer if all of it is there."""
        if len(self._buffer) < HEADER.size:
            return None
        kind, count = HEADER.unpack_from(self._buffer)
        if count > MAX_WORDS:
            self._usable = False
            raise ConnectionError(f"{self.peer} sent a message of {count} words: not one of ours")
        end = HEADER.size + 4 * count
        if len(self._buffer) < end:
            return None
        words = np.frombuffer(bytes(self._buffer[HEADER.size : end]), np.int32).tolist()
        del self._buffer[:end]
        return kind, words

    def _checked_io(self, act: Callable[[], None]) -> None:
        if not self._usable:
            raise ConnectionError(f"the connection to {self.peer} is closed")
        try:
            act()
        except TimeoutError:
            self._usable = False
            raise ConnectionError(f"{self.peer} does not listen") from None
        except OSError as error:  # what it sent before that can still be read
            raise ConnectionError(f"{self.peer} is gone ({error})") from None
        except BaseException:  # an interrupt may leave half a message behind
            self._usable = False
            raise


class Listener:
    """An address where one peer may call: who knows the ticket gets in, others are turned away."""

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0))
        self._auth_token = secrets.token_bytes(16)
        self.address = f"{host} {self._server.getsockname()[1]} {self._auth_token.hex()}"

    def accept(self, peer: str, timeout: float) -> TcpChannel:
        """The channel to whoever calls with the ticket. Raises TimeoutError."""
        end = time.monotonic() + timeout
        with self._server:
            while True:
                self._server.settimeout(max(end - time.monotonic(), MIN_POLL_S))
                sock, _ = self._server.accept()
                sock.settimeout(AUTH_TIMEOUT_S)
                if secrets.compare_digest(_recv_exactly(sock, len(self._auth_token)), self._auth_token):
                    return TcpChannel(sock, peer)
                sock.close()


def connect(address: str, peer: str, timeout: float) -> TcpChannel:
    """The other end of a door."""
    host, port, ticket = address.split()
    sock = socket.create_connection((host, int(port)), timeout)
    sock.sendall(bytes.fromhex(ticket))
    return TcpChannel(sock, peer)


def _recv_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        try:
            more = sock.recv(count - len(data))
        except OSError:
            break
        if not more:
            break
        data += more
    return data
