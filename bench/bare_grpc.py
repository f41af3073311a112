"""Minimal gRPC stream without SwiftSpec's messages, as a baseline for RPC latency (bench/rpc_latency.py).

    python -m bench.bare_grpc

The server prints its address. It answers each message after the delay, and with the number of bytes, that the message
requests.
"""

from __future__ import annotations

import os
import statistics
import struct
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from subprocess import Popen
from typing import Any

import grpc

from bench.workers import started
from swiftspec.distributed.transport.grpc import client, server
from swiftspec.observe.step_time_emulation import wait_until

METHOD = ("bench.Bare", "Echo")
ASK = struct.Struct("dI")  # requested delay in seconds, and requested size of the answer in bytes
REST = struct.Struct("d")  # actual duration of the delay in seconds
ROUNDS = 64
SPIN = """import os
os.sched_setaffinity(0, {%d})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while True:
    pass"""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Sizes and delays of a message and its answer.

    `there`, `back`: bytes of the message and of the answer. `rest`: delay of the answer on the server, in seconds.
    `between`: pause of the client before each message, in seconds.
    """

    there: int
    back: int
    rest: float
    between: float


@contextmanager
def listening() -> Iterator[str]:
    """Starts a server in another process and yields its address."""
    with started([sys.executable, "-m", "bench.bare_grpc"], r"listening on (\S+)") as url:
        yield url


def overhead(url: str, exchange: Exchange) -> float:
    """Returns the median duration of an exchange without the delay on the server, in seconds."""
    out: SimpleQueue[bytes | None] = SimpleQueue()
    ask = ASK.pack(exchange.rest, exchange.back).ljust(exchange.there, b"\0")
    seconds: list[float] = []
    with grpc.insecure_channel(url, client.OPTIONS) as channel:
        answers: Any = channel.stream_stream("/" + "/".join(METHOD))(iter(out.get, None))
        for _ in range(ROUNDS):
            wait_until(time.perf_counter() + exchange.between)
            began = time.perf_counter()
            out.put(ask)
            (rest,) = REST.unpack_from(next(answers))
            seconds.append(time.perf_counter() - began - rest)
        out.put(None)
    return statistics.median(seconds)


@contextmanager
def awake() -> Iterator[None]:
    """Keeps all CPUs from halting, by one busy process per CPU at the lowest scheduling priority.

    A halted CPU of a virtual machine wakes up late, which would be measured as RPC latency.
    """
    spinners = [Popen([sys.executable, "-c", SPIN % cpu]) for cpu in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def _answers(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
    for data in requests:
        began = time.perf_counter()
        rest, size = ASK.unpack_from(data)
        wait_until(began + rest)
        yield REST.pack(time.perf_counter() - began).ljust(size, b"\0")


def main() -> None:
    """Serves until the process is killed."""
    serves = grpc.server(ThreadPoolExecutor(2), options=server.OPTIONS)
    service, name = METHOD
    handlers = {name: grpc.stream_stream_rpc_method_handler(_answers)}
    serves.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = serves.add_insecure_port("127.0.0.1:0")
    serves.start()
    print(f"listening on 127.0.0.1:{port}", flush=True)
    serves.wait_for_termination()


if __name__ == "__main__":
    main()
