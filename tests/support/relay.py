"""A TCP relay that makes loopback a slow connection: delay and bandwidth per direction, stalls, resets.

    python -m tests.support.relay --to 127.0.0.1:9000 --link 40ms,1Gbit

prints the address to connect to, and relays until its input ends. Data in flight is queued with the time when it is
due, so a connection holds as many messages as fit into its delay.
"""

from __future__ import annotations

import argparse
import math
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass, field
from queue import Empty, Full, Queue
from typing import Any

from swiftspec.lab.network_link import Link
from swiftspec.observe.step_time_emulation import wait_until

CHUNK = 16 << 10  # bytes per read
HELD = 1024  # chunks in flight in one direction of a connection; beyond them its sender blocks
LOOK = 0.05  # seconds between two checks whether the connection was cut
ABORT = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets


@dataclass
class Way:
    """One direction of the simulated link, which all connections share."""

    delay: float  # seconds
    bandwidth: float = math.inf  # bytes a second
    free_at: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def due(self, now: float, size: int) -> float:
        """The time when the last of `size` bytes that are sent now arrives, after those before them."""
        with self.lock:
            self.free_at = max(now, self.free_at) + size / self.bandwidth
            return self.free_at + self.delay


class Connection:
    """A client, the server, and the data in flight between them."""

    def __init__(
        self, client: socket.socket, server: socket.socket, there: Way, back: Way, flows: threading.Event
    ) -> None:
        self.ends = client, server
        self._flows = flows
        self.cut = threading.Event()
        for end in self.ends:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.settimeout(LOOK)
        self._threads: list[threading.Thread] = []
        for source, sink, way in ((client, server, there), (server, client, back)):
            under_way: Queue[tuple[float, bytes]] = Queue(HELD)
            self._threads += [self._start(self._take, source, way, under_way), self._start(self._give, sink, under_way)]

    def run(self) -> None:
        """Relays until both sides have ended, or the connection was cut, which resets both."""
        for thread in self._threads:
            thread.join()
        for end in self.ends:
            if self.cut.is_set():
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
            end.close()

    def _start(self, act: Any, *args: Any) -> threading.Thread:
        thread = threading.Thread(target=act, args=args, daemon=True)
        thread.start()
        return thread

    def _take(self, source: socket.socket, way: Way, under_way: Queue[tuple[float, bytes]]) -> None:
        data = b"more"
        while data and not self.cut.is_set():
            try:
                data = source.recv(CHUNK)
            except TimeoutError:
                continue
            except OSError:
                self.cut.set()
                return
            due = way.due(time.perf_counter(), len(data))
            while not self.cut.is_set():
                try:
                    under_way.put((due, data), timeout=LOOK)
                    break
                except Full:
                    continue

    def _give(self, sink: socket.socket, under_way: Queue[tuple[float, bytes]]) -> None:
        while not self.cut.is_set():
            try:
                due, data = under_way.get(timeout=LOOK)
            except Empty:
                continue
            wait_until(due)
            while not self._flows.wait(LOOK) and not self.cut.is_set():
                pass
            try:
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                self._send(sink, memoryview(data))
            except OSError:
                self.cut.set()

    def _send(self, sink: socket.socket, data: memoryview) -> None:
        while data and not self.cut.is_set():
            try:
                data = data[sink.send(data) :]
            except TimeoutError:
                continue


class Relay:
    """Listens on loopback for connections to a remote server. Must be closed, or used as a context manager."""

    def __init__(self, server: tuple[str, int], there: Way, back: Way | None = None) -> None:
        """`there`: client to server; `back`: server to client, if different."""
        self._server = server
        self._ways = there, back or Way(there.delay, there.bandwidth)
        self._flows = threading.Event()
        self._flows.set()
        self._connections: list[Connection] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def stall(self) -> None:
        """Stops all delivery."""
        self._flows.clear()

    def resume(self) -> None:
        """Continues, and delivers all overdue data immediately."""
        self._flows.set()

    def reset(self) -> None:
        """Resets all connections; new ones are accepted."""
        for connection in self._connections:
            connection.cut.set()
        self._connections.clear()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        self.reset()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._server)
            except OSError:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
                client.close()
                continue
            self._connections.append(connection := Connection(client, server, *self._ways, self._flows))
            self._threads.append(threading.Thread(target=connection.run, daemon=True))
            self._threads[-1].start()


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.relay")
    parser.add_argument("--to", required=True, metavar="HOST:PORT")
    parser.add_argument("--link", required=True, type=Link.parse, help="round trip and bandwidth: 40ms,1Gbit")
    args = parser.parse_args()
    host, _, port = args.to.rpartition(":")
    with Relay((host, int(port)), Way(args.link.round_trip / 2, args.link.bandwidth)) as relay:
        print(*relay.address, sep=":", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
