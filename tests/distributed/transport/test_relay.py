"""The relay that simulates a slow connection: which data it forwards, and the earliest time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.relay import Direction, Relay

LONG = 30.0  # seconds; more than anything takes


@pytest.fixture
def server() -> Iterator[tuple[str, int]]:
    """Echoes everything, to any number of clients."""
    listener = socket.create_server(("127.0.0.1", 0))

    def echo(end: socket.socket) -> None:
        with end:
            try:
                while data := end.recv(1 << 16):
                    end.sendall(data)
            except ConnectionError:
                pass

    def serve() -> None:
        while True:
            try:
                end, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=echo, args=(end,), daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()
    listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    listener.close()


def connect(relay: Relay) -> socket.socket:
    return socket.create_connection(relay.address, timeout=LONG)


def read(end: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size and (data := end.recv(size - len(found))):
        found += data
    return found


def test_messages_share_a_delay_and_queue_for_the_bandwidth() -> None:
    way = Direction(delay=2.0, bandwidth=100.0)
    assert [way.due(now, 50) for now in (0.0, 0.0, 0.1, 9.0)] == [2.5, 3.0, 3.5, 11.5]
    assert [Direction(2.0).due(now, 50) for now in (0.0, 1.0)] == [2.0, 3.0]


def test_bytes_arrive_complete_in_order_and_not_early(server: tuple[str, int]) -> None:
    data = bytes(range(256)) * 4096
    with Relay(server, Direction(0.02), Direction(0.03)) as relay, connect(relay) as one, connect(relay) as other:
        began = time.perf_counter()
        sender = threading.Thread(target=lambda: one.sendall(data))
        sender.start()
        other.sendall(b"beside it")
        assert read(other, 9) == b"beside it" and time.perf_counter() - began > 0.05
        assert read(one, len(data)) == data
        sender.join()
        one.shutdown(socket.SHUT_WR)
        assert one.recv(1) == b"", "the end comes through"


def test_a_stall_delays_everything_and_a_reset_is_forwarded(server: tuple[str, int]) -> None:
    with Relay(server, Direction(0.0)) as relay, connect(relay) as end:
        relay.stall()
        end.sendall(b"late")
        end.settimeout(0.1)
        with pytest.raises(TimeoutError):
            end.recv(4)
        relay.resume()
        end.settimeout(LONG)
        assert read(end, 4) == b"late"
        relay.reset()
        with pytest.raises(ConnectionResetError):
            end.recv(1)
        with connect(relay) as again:
            again.sendall(b"back")
            assert read(again, 4) == b"back"


def test_a_missing_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = closed.getsockname()
    # The reset may come while the client still connects.
    with Relay(nowhere, Direction(0.0)) as relay, pytest.raises(ConnectionResetError), connect(relay) as end:
        end.recv(1)
