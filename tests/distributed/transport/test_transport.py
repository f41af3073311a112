"""Messages between two processes over each transport: complete, in order, and with a visible end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from swiftspec.distributed.transport import tcp
from swiftspec.distributed.transport.tcp import HEADER, MAX_WORDS, TcpTransport
from swiftspec.distributed.transport.transport import Transport, accept, dial
from tests.support.transports import KINDS, FakeStore, both_ends, connect


@pytest.fixture(params=KINDS)
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Transport, Transport]]:
    with both_ends(request.param) as ends:
        yield ends


def received(end: Transport) -> tuple[int, list[int]]:
    kind, words = end.recv(10)
    return kind, list(words)


def test_messages_arrive_complete_and_in_order(ends: tuple[Transport, Transport]) -> None:
    near, far = ends
    messages = [list(range(-7, n - 7)) for n in (0, 1, 5, 1000, 40_000)]
    sender = threading.Thread(target=lambda: [near.send(kind, words) for kind, words in enumerate(messages)])
    sender.start()
    for kind, words in enumerate(messages):
        assert received(far) == (kind, words)
    sender.join()
    far.send(99)
    assert near.recv()[0] == 99


def test_a_wait_times_out_and_can_be_repeated(ends: tuple[Transport, Transport]) -> None:
    near, far = ends
    for timeout in (0.0, 0.1):
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"no message from .* within"):
            near.recv(timeout)
        assert time.monotonic() - began >= timeout
    far.send(3, [4])
    assert received(near) == (3, [4])


def test_a_lost_peer_is_detected(ends: tuple[Transport, Transport]) -> None:
    near, far = ends
    far.send(1)
    far.close()
    assert near.recv(5)[0] == 1, "what it had sent is still there"
    with pytest.raises(ConnectionError, match="disconnected"):
        near.recv(5)
    with pytest.raises(ConnectionError):
        for _ in range(1000):
            near.send(2, [0] * 1000)


class Listener:
    """A rank that listens for a peer, at an address that anyone can connect to."""

    def __init__(self) -> None:
        self._store = FakeStore()
        self.got: list[Transport] = []
        self.waiting = threading.Thread(target=self._wait)
        self.waiting.start()
        _, host, port, _ = self._store.get("door").decode().split()
        self.address = host, int(port)

    def _wait(self) -> None:
        far = accept(self._store, "door", "a friend", host="127.0.0.1", spin=False, timeout=10)  # type: ignore[arg-type]
        self.got.append(far)

    def connect_peer(self) -> Transport:
        """Connects with the ticket."""
        return dial(self._store, "door", "the house", spin=False, timeout=10)  # type: ignore[arg-type]


def test_a_connection_without_the_ticket_is_refused() -> None:
    listener = Listener()
    with socket.create_connection(listener.address) as stranger:
        stranger.sendall(bytes(16))
        assert stranger.recv(1) == b"", "turned away"
    peer = listener.connect_peer()
    listener.waiting.join()
    peer.send(5)
    assert listener.got[0].recv(5)[0] == 5


def test_a_silent_connection_does_not_block_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "AUTH_TIMEOUT_S", 0.1)
    listener = Listener()
    with socket.create_connection(listener.address):
        peer = listener.connect_peer()
        listener.waiting.join(5)
    assert not listener.waiting.is_alive() and listener.got
    peer.send(5)
    assert listener.got[0].recv(5)[0] == 5


def test_no_rank_arrives() -> None:
    for host in (None, "127.0.0.1"):
        with pytest.raises(OSError, match=r"time|came"):
            accept(FakeStore(), "alone", "nobody", host=host, spin=False, timeout=0.2)  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [HEADER.pack(1, MAX_WORDS + 1), b"GET / HTTP/1.1\r\n\r\n"])
def test_a_stream_of_another_protocol_is_refused(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    channel = TcpTransport.__new__(TcpTransport)
    channel.peer, channel._sock, channel._buffer, channel._usable = "the stranger", ours, bytearray(), True
    theirs.sendall(data)
    with pytest.raises(ConnectionError, match="invalid message of"):
        channel.recv(5)
    with pytest.raises(ConnectionError, match="closed"):
        channel.send(1)


def test_an_interrupt_in_the_middle_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = connect("127.0.0.1")

    def interrupted(*_: object) -> Callable[[], None]:
        raise KeyboardInterrupt

    monkeypatch.setattr(TcpTransport, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        near.recv(1)
    with pytest.raises(ConnectionError, match="closed"):
        near.recv(1)
    far.close()
