"""RPC latency of a worker: the time from request to response, minus the model's time as the worker reports it.

    python -m bench.rpc_latency [--tokens 128] [--awake] [--json out.json]

Runs the workers of bench/workers.py over loopback, with the decoding loop in this process, in modes serial (one
proposal per result) and async (a stream of tree deltas). Bytes are those of the messages, without gRPC framing. Two
figures for comparison: a bare gRPC stream with messages of the same sizes after the same delays (`bare_ms`), and the
worker's work around its forwards, which a local model requires too (`around_ms`). The remainder of `p50_ms` is the
overhead of the protocol. Also measured: the round trip of a Ping, back to back and after a pause as long as a
verification. `--awake` prevents the CPUs from being halted between messages (bench/bare_grpc.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from bench import bare_grpc
from bench.data.heldout import texts
from bench.workers import LEAVES, NODES, PACES, workers
from swiftspec.builder.load_options import WorkerAddress
from swiftspec.builder.remote_roles import RemoteTarget, build_remote_roles
from swiftspec.config import EngineConfig
from swiftspec.distributed.remote.session_messages import unpack_timed
from swiftspec.distributed.transport.codec import Frame, unpack_tree_delta
from swiftspec.distributed.transport.grpc.client import GrpcTransport
from swiftspec.distributed.transport.grpc.endpoint import TARGET_SERVICE, RpcSecurity
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.params import SamplingParams
from swiftspec.startup.built_in_models import DEMO_MODELS
from swiftspec.text.codec import TextCodec
from swiftspec.token_engine import TokenEngine

MEASURED = (Opcode.DRAFTER_OPEN, Opcode.OBSERVE, Opcode.VERIFIER_OPEN, Opcode.VERIFY)  # messages with an answer
PROMPTS = slice(12, 16)  # different from the prompts of the predicted rounds
MODES = ("serial", "async")


@dataclass
class RpcTimes:
    """Measurements of one side (target or draft), in seconds and bytes.

    `overhead`: RPC latency of each response. `model`: time of the model's forwards. `worker_overhead`: the worker's
    time around the forwards. `between`: time between a response and the next message. `expansion`: duration of an
    expansion as the worker reports it.
    """

    sent_at: float = 0.0  # when the last message was sent
    received_at: float = 0.0  # when the last response arrived
    overhead: list[float] = field(default_factory=list)
    model: list[float] = field(default_factory=list)
    worker_overhead: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    expansion: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    received_bytes: list[int] = field(default_factory=list)

    def extend(self, request: RpcTimes) -> None:
        """Adds the measurements of a request, except the first two messages, which start the request."""
        for name, values in vars(self).items():
            if isinstance(values, list):
                values += getattr(request, name)[2:]


@contextmanager
def measured(times: dict[str, RpcTimes]) -> Iterator[None]:
    """Adds times and sizes of the messages of all transports to `times`, by side, inside the context."""
    send, recv = GrpcTransport.send, GrpcTransport.recv

    def of(transport: GrpcTransport) -> RpcTimes:
        return times["target" if "--target-url" in transport.peer else "draft"]

    def timed_send(self: GrpcTransport, kind: int, words: Sequence[int] = ()) -> None:
        entry = of(self)
        if kind in MEASURED:
            entry.sent_at = time.perf_counter()
            entry.between.append(entry.sent_at - entry.received_at)
            entry.sent_bytes.append(4 * len(words))
        send(self, kind, words)

    def timed_recv(self: GrpcTransport, timeout: float | None = None) -> Frame:
        kind, words = recv(self, timeout)
        entry, received_at = of(self), time.perf_counter()
        if kind == Opcode.TIMED_ANSWER:
            cost, inner, body = unpack_timed(words)
            entry.received_at = received_at
            entry.model.append(1e-6 * body[0])
            entry.worker_overhead.append(1e-9 * cost.wall - entry.model[-1])
            entry.overhead.append(received_at - entry.sent_at - entry.model[-1])
            entry.received_bytes.append(4 * len(words))
            if inner == Opcode.TREE_DELTA and (expansions := unpack_tree_delta(body[1:]).expansions):
                entry.expansion.append(1e-9 * cost.wall / expansions)
        return kind, words

    GrpcTransport.send, GrpcTransport.recv = timed_send, timed_recv  # type: ignore[method-assign]
    try:
        yield
    finally:
        GrpcTransport.send, GrpcTransport.recv = send, recv  # type: ignore[method-assign]


def rounds(mode: str, urls: dict[str, str], tokens: int) -> tuple[dict[str, RpcTimes], int]:
    """Decodes a few prompts through the workers.

    Returns the measurements of the rounds by side, without request starts, and the number of rounds.
    """
    codec = TextCodec(DEMO_MODELS.target)
    prompts = [codec.encode(text, 1024) for text in texts()[PROMPTS]]
    codec.close()
    found, count = {side: RpcTimes() for side in PACES}, 0
    remote = {side: WorkerAddress(urls[side], f"--{side}-url", RpcSecurity(), 30.0) for side in PACES}
    plan = EngineConfig(mode, verify_batch=NODES, draft_leaves=LEAVES, target_remote=True, draft_remote=True)
    with tempfile.TemporaryDirectory() as folder:
        target = RemoteTarget(remote["target"])
        running = TokenEngine(build_remote_roles(target, None, plan, Path(folder), draft_worker=remote["draft"]))
        for prompt in prompts:
            times = {side: RpcTimes() for side in PACES}
            with measured(times):
                running.generate(prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
            count += running.stats.rounds
            for side in PACES:
                found[side].extend(times[side])
        running.close()
    return found, count


def round_trip(url: str, pause_s: float = 0.0) -> float:
    """Returns the median seconds of 20 Pings, each after a pause of `pause_s` seconds."""
    with grpc.insecure_channel(url) as channel:
        ping, seconds = channel.unary_unary(f"/{TARGET_SERVICE}/Ping"), []
        for _ in range(20):
            time.sleep(pause_s)
            began = time.perf_counter()
            ping(b"")
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def worker_overhead(urls: dict[str, str]) -> dict[str, float]:
    """Returns the seconds of the work around the forwards in mode async, by the field names of `SimulatedTimes`.

    Field `verify` is the RPC latency of a verification beyond a Ping, `expand` the time of an expansion beyond its
    step, `answer` the time from a result to the next proposal if the proposal does not have to wait.
    """
    times, _ = rounds("async", urls, 64)
    verify = max(statistics.median(times["target"].overhead) - round_trip(urls["target"]), 0.0)
    expand = max(statistics.median(times["draft"].expansion) - PACES["draft"], 0.0)
    return {"verify": verify, "expand": expand, "answer": statistics.quantiles(times["target"].between, n=10)[0]}


def row(mode: str, side: str, times: RpcTimes, count: int, url: str) -> dict[str, Any]:
    """Returns the printed figures of one side. `count`: rounds. `url`: address of the bare stream."""
    size = {"there": sum(times.sent_bytes) / count, "back": sum(times.received_bytes) / count}
    about = {"mode": mode, "side": side, "rounds": count, **size}
    if mode == "async" and side == "draft":  # tree deltas do not answer a request, so they have no RPC latency
        return about
    tenths = statistics.quantiles(times.overhead, n=10)
    middle = statistics.median
    sent, received = int(middle(times.sent_bytes)), int(middle(times.received_bytes))
    wire = bare_grpc.Exchange(sent, received, middle(times.model), middle(times.between))
    seconds = {"p50": middle(times.overhead), "p90": tenths[-1], "around": middle(times.worker_overhead)}
    seconds["bare"] = bare_grpc.overhead(url, wire)
    return {**about, **{f"{name}_ms": 1e3 * each for name, each in seconds.items()}}


def main() -> None:
    """Measures and prints the rows."""
    parser = argparse.ArgumentParser(prog="python -m bench.rpc_latency", description=__doc__)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--awake", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    with workers() as urls, bare_grpc.listening() as echo, bare_grpc.awake() if args.awake else nullcontext():
        for mode in MODES:
            times, count = rounds(mode, urls, args.tokens)
            found += [row(mode, side, times[side], count, echo) for side in PACES]
        found.append({"ping_ms": 1e3 * round_trip(urls["target"]), "rested_ms": 1e3 * round_trip(urls["target"], 0.03)})
    for each in found:
        print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in each.items()), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
