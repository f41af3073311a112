"""Both ends of each transport, in one process: the first end is the client's, the second one the server's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

from swiftspec.distributed.transport.codec import Frame, Words
from swiftspec.distributed.transport.grpc.client import GrpcConnection
from swiftspec.distributed.transport.grpc.endpoint import DRAFT_SERVICE, Endpoint, RpcSecurity
from swiftspec.distributed.transport.grpc.server import RpcServer
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.transport import Receiver, Transport, accept, dial

KINDS = ["shared", "tcp", "grpc"]


class FakeStore:
    """A store of one process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._news = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._news:
            self._values[key] = value
            self._news.notify_all()

    def get(self, key: str) -> bytes:
        with self._news:
            assert self._news.wait_for(lambda: key in self._values, 10)
            return self._values[key].encode()


def connect(host: str | None) -> tuple[Transport, Transport]:
    """Both ends over shared memory, or over TCP if there is a host."""
    store, ends = FakeStore(), {}

    def call() -> None:
        ends["there"] = dial(store, "here", "the caller's peer", spin=False, timeout=10)  # type: ignore[arg-type]

    caller = threading.Thread(target=call)
    caller.start()
    near = accept(store, "here", "the caller", host=host, spin=False, timeout=10)  # type: ignore[arg-type]
    caller.join()
    return near, ends["there"]


class GrpcServerEnd:
    """A worker's end of a gRPC stream, as a `Transport`. Its first use blocks until the client has sent a message."""

    peer = "the client"

    def __init__(self) -> None:
        self._arrived: SimpleQueue[Receiver] = SimpleQueue()
        self._receiver: Receiver | None = None
        self._out: SimpleQueue[Frame | None] = SimpleQueue()

    def serve(self, receiver: Receiver, cancelled: Callable[[], bool]) -> Iterator[Frame]:
        self._out.put(None)  # ends the thread of a stream that the client has restarted
        out = self._out = SimpleQueue()
        self._arrived.put(receiver)
        yield from iter(out.get, None)

    def send(self, kind: int, words: Sequence[int] = ()) -> None:
        self._connected()
        self._out.put((kind, list(words)))

    def recv(self, timeout: float | None = None) -> Frame:
        while True:
            try:
                return self._connected().recv(timeout)
            except ConnectionError:  # the client has restarted its stream, or is gone
                try:
                    self._receiver = self._arrived.get(timeout=2)
                except Empty:
                    raise ConnectionError("the client is gone") from None

    def recv_or_reply(self, reply: Any, asks: int, answers: int, note: int) -> tuple[int, Words, bool]:
        return *self.recv(), False

    def restart(self) -> None: ...

    def close(self) -> None:
        self._out.put(None)

    def _connected(self) -> Receiver:
        if self._receiver is None:
            self._receiver = self._arrived.get(timeout=10)
        return self._receiver


@contextmanager
def both_ends(kind: str) -> Iterator[tuple[Transport, Transport]]:
    """Both ends of a transport of this kind."""
    if kind != "grpc":
        near, far = connect(None if kind == "shared" else "127.0.0.1")
        yield near, far
        near.close()
        far.close()
        return
    end, security = GrpcServerEnd(), RpcSecurity()
    server = RpcServer(DRAFT_SERVICE, end.serve, "{}", Endpoint("127.0.0.1", 0), security, max_sessions=2)
    connection = GrpcConnection(f"127.0.0.1:{server.port}", "--draft-url", DRAFT_SERVICE, security)
    near = connection.transport()
    near.send(Opcode.READY)  # opens the stream
    assert end.recv(10)[0] == Opcode.READY
    yield near, end
    near.close()
    end.close()
    connection.close()
    server.stop()
