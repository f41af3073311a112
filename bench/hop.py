"""What a hop to a worker costs beside its model: the wait for an answer less the model's time, as the worker tells it.

    python -m bench.hop [--tokens 128] [--pace 30,3] [--json out.json]

Two workers on this machine run the embedded pair, over loopback; the loop runs in this process. Modes serial (a
proposal for a result) and async (growth as it comes). Bytes are those of the messages, before gRPC's framing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from bench.data.heldout import texts
from bench.wire import NODES, started, worker
from swiftspec.assemble.elsewhere import RemoteTarget, assemble_elsewhere
from swiftspec.assemble.options import Worker
from swiftspec.config import EngineConfig
from swiftspec.distributed.grpc.endpoint import Security
from swiftspec.distributed.grpc.link import Stream
from swiftspec.llm import Running
from swiftspec.params import SamplingParams
from swiftspec.serve.found import embedded_model
from swiftspec.serve.text import TextCodec

PROMPTS = 4
SIDES = ("target", "draft")


@dataclass
class Hops:
    """Of one side: seconds of each answer beside the model's, and bytes there and back."""

    asked: float = 0.0  # when the last message was sent
    beside: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    come: list[int] = field(default_factory=list)


@contextmanager
def measured(hops: dict[str, Hops]) -> Iterator[None]:
    """Notes what goes through every stream meanwhile."""
    send, recv = Stream.send, Stream.recv

    def of(stream: Any) -> Hops:
        return hops["target" if "--target-url" in stream._peer else "draft"]

    def timed_send(self: Any, message: Message) -> None:
        hop = of(self)
        hop.sent.append(message.ByteSize())
        hop.asked = time.perf_counter()
        send(self, message)

    def timed_recv(self: Any, timeout: float) -> Any:
        answer, hop = recv(self, timeout), of(self)
        hop.come.append(answer.ByteSize())
        hop.beside.append(time.perf_counter() - hop.asked - 1e-9 * answer.telemetry.model)
        return answer

    Stream.send, Stream.recv = timed_send, timed_recv  # type: ignore[method-assign]
    try:
        yield
    finally:
        Stream.send, Stream.recv = send, recv  # type: ignore[method-assign]


def rounds(
    mode: str, urls: dict[str, str], prompts: Sequence[Sequence[int]], tokens: int
) -> tuple[dict[str, Hops], int]:
    """What the rounds of a few answers have cost, openings left out, and how many there were."""
    found, count = {side: Hops() for side in SIDES}, 0
    remote = {side: Worker(urls[side], f"--{side}-url", Security(), 30.0) for side in SIDES}
    shape = {"verify_batch": NODES, "draft_leaves": NODES}
    plan = EngineConfig(mode=mode, target_remote=True, draft_remote=True, **shape)
    with tempfile.TemporaryDirectory() as folder:
        target = RemoteTarget(remote["target"])
        running = Running(assemble_elsewhere(target, None, plan, Path(folder), draft_worker=remote["draft"]))
        for prompt in prompts:
            hops = {side: Hops() for side in SIDES}
            with measured(hops):
                running.generate(prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
            count += running.stats.rounds
            for side in SIDES:
                for name in ("beside", "sent", "come"):
                    getattr(found[side], name).extend(getattr(hops[side], name)[1:])
        running.close()
    return found, count


def row(mode: str, side: str, hops: Hops, count: int) -> dict[str, Any]:
    """What is printed of one side."""
    about = {"mode": mode, "side": side, "rounds": count}
    size = {"bytes_there": sum(hops.sent) / count, "bytes_back": sum(hops.come) / count, "answers": len(hops.come)}
    if mode == "async" and side == "draft":  # growth is no answer, so there is no hop
        return {**about, **size}
    tenths = statistics.quantiles(hops.beside, n=10)
    return {**about, **size, "p50_ms": 1e3 * statistics.median(hops.beside), "p90_ms": 1e3 * tenths[-1]}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.hop", description=__doc__)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--pace", default="30,3", help="milliseconds of a step of the target, and of the draft")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    paces = dict(zip(SIDES, (1e-3 * float(part) for part in args.pace.split(",")), strict=True))
    codec, found = TextCodec(Path(embedded_model("target"))), []
    prompts = [codec.encode(text, 1024) for text in texts()[:PROMPTS]]
    codec.close()
    with ExitStack() as workers:
        said = r"worker listening on (\S+)"
        urls = {side: workers.enter_context(started(worker(side, paces[side]), said)) for side in SIDES}
        for mode in ("serial", "async"):
            hops, count = rounds(mode, urls, prompts, args.tokens)
            found += [row(mode, side, hops[side], count) for side in SIDES]
    for each in found:
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in each.items()), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
