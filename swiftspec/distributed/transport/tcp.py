"""Transport over TCP, for jobs that span several machines."""

from __future__ import annotations

import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from swiftspec.distributed.transport.codec import Words

HEADER = struct.Struct("=II")  # opcode, number of words
MAX_WORDS = 1 << 24  # words per message (64 MiB), far more than any prompt has: a larger count means a corrupt stream
MIN_POLL_S = 1e-3  # seconds; shortest socket timeout, since 0 would make the socket non-blocking
AUTH_TIMEOUT_S = 2.0  # seconds that a client has to send its token; other clients wait meanwhile
LOST_TIMEOUT_S = 20  # after which a peer whose machine answers no packet counts as lost
KEEPALIVE_S = 5  # of silence, after which its machine is asked whether it is there, and between further questions
SEND_TIMEOUT_S = 30.0  # seconds; longest time that a send blocks while the peer does not read


class TcpTransport:
    """A `Transport` over a socket. After an exception in the middle of a message, every call raises ConnectionError."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _detect_lost_machine(sock)
        self.peer = peer
        self._sock = sock
        self._buffer = bytearray()
        self._usable = True

    def send(self, kind: int, words: Sequence[int] = ()) -> None:
        """Sends a message with opcode `kind`; returns before the peer has read it."""
        data = HEADER.pack(kind, len(words)) + np.array(words, np.int32).tobytes()
        self._sock.settimeout(SEND_TIMEOUT_S)
        self._checked_io(lambda: self._sock.sendall(data))

    def recv(self, timeout: float | None = None) -> tuple[int, Words]:
        """Returns opcode and words of the next message. Raises TimeoutError if it does not arrive within `timeout`
        seconds (None: no limit); the call can then be repeated."""
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
        """Receives like `recv`, without a timeout. Never replies in native code, so the last value is False."""
        return *self.recv(), False

    def restart(self) -> None:
        pass  # the same connection serves all requests

    def close(self) -> None:
        self._usable = False
        self._sock.close()

    def _read(self) -> None:
        try:
            data = self._sock.recv(1 << 16)
        except TimeoutError:
            return
        if not data:
            raise ConnectionError(f"{self.peer} disconnected")
        self._buffer += data

    def _pop_message(self) -> tuple[int, Words] | None:
        """Removes and returns the first message in the buffer; returns None if it is incomplete."""
        if len(self._buffer) < HEADER.size:
            return None
        kind, count = HEADER.unpack_from(self._buffer)
        if count > MAX_WORDS:
            self._usable = False
            raise ConnectionError(f"{self.peer} sent an invalid message of {count} words")
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
            raise ConnectionError(f"{self.peer} did not read a message within {SEND_TIMEOUT_S:g} s") from None
        except OSError as error:  # the transport stays usable: messages that arrived earlier can still be read
            raise ConnectionError(f"{self.peer} disconnected ({error})") from None
        except BaseException:  # an interrupt may have left a partial message
            self._usable = False
            raise


class Listener:
    """Listening socket for one peer, which authenticates with a random token. `address`: host, port and token, as
    `connect` takes them."""

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0))
        self._auth_token = secrets.token_bytes(16)
        self.address = f"{host} {self._server.getsockname()[1]} {self._auth_token.hex()}"

    def accept(self, peer: str, timeout: float) -> TcpTransport:
        """Returns the transport to the client that sends the token; closes connections of other clients. Raises
        TimeoutError if that client does not connect within `timeout` seconds."""
        end = time.monotonic() + timeout
        with self._server:
            while True:
                self._server.settimeout(max(end - time.monotonic(), MIN_POLL_S))
                sock, _ = self._server.accept()
                sock.settimeout(AUTH_TIMEOUT_S)
                if secrets.compare_digest(_recv_exactly(sock, len(self._auth_token)), self._auth_token):
                    return TcpTransport(sock, peer)
                sock.close()


def connect(address: str, peer: str, timeout: float) -> TcpTransport:
    """Connects to the `Listener` at `address`: host, port and token, separated by spaces. Raises OSError if that fails
    or takes longer than `timeout` seconds."""
    host, port, ticket = address.split()
    sock = socket.create_connection((host, int(port)), timeout)
    sock.sendall(bytes.fromhex(ticket))
    return TcpTransport(sock, peer)


def _detect_lost_machine(sock: socket.socket) -> None:
    """Makes reads and writes fail if the peer's machine is unreachable for LOST_TIMEOUT_S. The system's own limits are
    hours for reads and a quarter of an hour for writes. A peer that is only busy or suspended is not lost."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": KEEPALIVE_S,
        "TCP_KEEPINTVL": KEEPALIVE_S,
        "TCP_KEEPCNT": LOST_TIMEOUT_S // KEEPALIVE_S,
        "TCP_USER_TIMEOUT": 1000 * LOST_TIMEOUT_S,
    }
    for name, value in options.items():
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


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
