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

from bench.prediction.network_link import Link
from swiftspec.observe.step_time_emulation import wait_until

CHUNK_BYTES = 16 << 10  # bytes per read
MAX_CHUNKS = 1024  # chunks in flight in one direction of a connection; beyond them its sender blocks
POLL_S = 0.05  # seconds between two checks whether the connection was cut
ABORT = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets


@dataclass
class Direction:
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
        self,
        client: socket.socket,
        server: socket.socket,
        forward: Direction,
        backward: Direction,
        flows: threading.Event,
    ) -> None:
        self.ends = client, server
        self._flows = flows
        self.cut = threading.Event()
        for end in self.ends:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.settimeout(POLL_S)
        self._threads: list[threading.Thread] = []
        for source, sink, way in ((client, server, forward), (server, client, backward)):
            in_flight: Queue[tuple[float, bytes]] = Queue(MAX_CHUNKS)
            self._threads += [self._start(self._take, source, way, in_flight), self._start(self._give, sink, in_flight)]

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

    def _take(self, source: socket.socket, way: Direction, in_flight: Queue[tuple[float, bytes]]) -> None:
        data = b"more"
        while data and not self.cut.is_set():
            try:
                data = source.recv(CHUNK_BYTES)
            except TimeoutError:
                continue
            except OSError:
                self.cut.set()
                return
            due = way.due(time.perf_counter(), len(data))
            while not self.cut.is_set():
                try:
                    in_flight.put((due, data), timeout=POLL_S)
                    break
                except Full:
                    continue

    def _give(self, sink: socket.socket, in_flight: Queue[tuple[float, bytes]]) -> None:
        while not self.cut.is_set():
            try:
                due, data = in_flight.get(timeout=POLL_S)
            except Empty:
                continue
            wait_until(due)
            while not self._flows.wait(POLL_S) and not self.cut.is_set():
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

    def __init__(self, server: tuple[str, int], forward: Direction, backward: Direction | None = None) -> None:
        """`forward`: client to server; `backward`: server to client, if different."""
        self._server = server
        self._ways = forward, backward or Direction(forward.delay, forward.bandwidth)
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
    with Relay((host, int(port)), Direction(args.link.round_trip / 2, args.link.bandwidth)) as relay:
        print(*relay.address, sep=":", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
