"""Timelines of target and draft in asynchronous mode: time per function in a round, and waiting times of both sides.

    torchrun --standalone --nproc-per-node 2 -m bench.lanes [--limit 8] [--steps 4] [--temperature 0] [--supervised]

Processes of one machine share a clock, so the timelines are aligned. Timing adds a microsecond to each timed function;
`target busy` comes from a run without timing. With `--device cuda` (not run yet) every rank has its own GPU.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore
from transformers import AutoTokenizer

from bench.common.device import add_device_flag, check_device
from bench.data.heldout import DEMO, read_prompts
from swiftspec.builder.load_options import LoadOptions
from swiftspec.cache.model_cache import ModelCache
from swiftspec.config import EngineConfig
from swiftspec.distributed.launch.control_socket import SupervisorClient, encode_first_message
from swiftspec.distributed.launch.supervisor_link import SupervisorLink
from swiftspec.distributed.launch.world import World, join_world
from swiftspec.distributed.transport.shm import ShmTransport
from swiftspec.llm_engine import LLMEngine, serve_rank
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors.graph_expansions import GraphExpansionExecutor
from swiftspec.runtime.executors.graph_verifications import GraphVerificationExecutor
from swiftspec.runtime.executors.native import NativeExecutor
from swiftspec.runtime.executors.native_tree import NativeTree
from swiftspec.runtime.runner import Runner
from swiftspec.sampling.sampler import Sampler
from swiftspec.tree import acceptance as tree_walk
from swiftspec.tree.tree import DraftTree

TIMED: list[tuple[Any, str]] = [
    (Runner, "_batch"), (Runner, "run"), (NativeExecutor, "verify"), (NativeExecutor, "expand"),
    (GraphVerificationExecutor, "verify"), (GraphExpansionExecutor, "expand"),
    (ShmTransport, "send"),
    (ShmTransport, "recv"), (ShmTransport, "recv_or_reply"),
    (ModelCache, "commit"), (Sampler, "draw"), (Sampler, "children"), (DraftTree, "best_leaves"),
    (DraftTree, "add_children"), (tree_walk, "match_path"),
    *((tree, name) for tree in (DraftTree, NativeTree) for name in ("best_subtree", "match_prefix", "reroot")),
]  # fmt: skip
# printed names; a forward is batch construction and the model's run
PRINTED = {"_batch": "forward", "run": "forward"}
MODELS = (DEMO / "target", DEMO / "draft")
Span = tuple[str, float, float]  # name, begin and end in seconds


@contextmanager
def timed(spans: list[Span]) -> Iterator[None]:
    """Appends a span to `spans` for each call of the functions in TIMED, inside the context."""

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spans.append((name, began, time.perf_counter()))

        return wrapper

    originals = [(owner, name, getattr(owner, name)) for owner, name in TIMED]
    for owner, name, function in originals:
        setattr(owner, name, wrap(PRINTED.get(name, name), function))
    try:
        yield
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)


def rounds(target: list[Span]) -> list[tuple[float, float]]:
    """Returns (begin, end) of each round in seconds: from the arrival of one proposal at the target to that of the
    next.

    Intervals of 0.1 s or more contain a request start and are left out.
    """
    ends = [end for name, _, end in target if name == "recv"]
    return [(a, b) for a, b in pairwise(ends) if b - a < 0.1]


def host_times(target: list[Span], draft: list[Span]) -> list[float]:
    """Returns the seconds from one verification to the next, in rounds whose proposal was ready.

    That is the host time on the critical path. The list is empty without executors that run a phase in one call.
    """
    expansions, times = [(a, b) for name, a, b in draft if name == "expand"], []
    verifications = sorted(span[1:] for span in target if span[0] == "verify")
    for (_, begin), (end, _) in pairwise(verifications):
        inside = [(name, b) for name, a, b in target if begin <= a < end]
        sent, received = ([b for name, b in inside if name == what] for what in ("send", "recv"))
        if len(sent) != 1 or len(received) != 1:
            continue  # end of a request
        if not any(a <= sent[0] < b or (sent[0] < a and b < received[0]) for a, b in expansions):
            times.append(end - begin)
    return times


def table(lane: str, spans: list[Span], spots: list[tuple[float, float]]) -> None:
    """Prints the mean milliseconds per round by function. `spots`: (begin, end) of the rounds."""
    begin, end = spots[0][0], spots[-1][1]
    total: defaultdict[str, float] = defaultdict(float)
    for name, a, b in spans:
        total[name] += 1000 * max(min(b, end) - max(a, begin), 0.0)
    total["(rest)"] = 1000 * (end - begin) - sum(total.values())
    print(f"{lane}: " + ", ".join(f"{n} {t / len(spots):.3f}" for n, t in sorted(total.items(), key=lambda x: -x[1])))


def decode(
    world: World, config: EngineConfig, options: LoadOptions, limit: int, temperature: float
) -> tuple[LLMEngine, float, float]:
    """Decodes the prompts on rank 0. Returns the engine, the share of time in which the target is busy, and the tokens
    per round."""
    llm = LLMEngine(*MODELS, config, world=world, **options)
    prompts = read_prompts(AutoTokenizer.from_pretrained(MODELS[0]))[: limit + 1]
    sampling = SamplingParams(temperature=temperature, max_tokens=128, ignore_eos=True)
    busy = spent = tokens = count = 0.0
    for number, prompt in enumerate(prompts):
        stats = llm.generate(prompt, sampling).stats
        if number:  # the first prompt is the warm-up
            busy, spent = busy + stats.target_busy_time, spent + stats.decode_time
            tokens, count = tokens + stats.tokens, count + stats.rounds
    llm.close()
    return llm, busy / spent, tokens / count


def show(target: list[Span], draft: list[Span]) -> None:
    """Prints the means over all rounds, then the timeline of one round of median length."""
    spots = rounds(target)
    table("target, ms per round", target, spots)
    table("draft,  ms per round", draft, spots)
    length = statistics.median(b - a for a, b in spots)
    host = host_times(target, draft)
    if host:
        print(
            f"host on the critical path: {1e6 * statistics.median(host):.0f} us, median of the {len(host)}"
            f" of {len(spots)} rounds in which the draft was ready"
        )
    begin, end = min(spots, key=lambda spot: abs(spot[1] - spot[0] - length))
    print(f"one round of {1000 * length:.2f} ms (median of {len(spots)}), times in microseconds from its start:")
    for lane, spans in (("target", target), ("draft", draft)):
        for name, a, b in sorted(spans, key=lambda span: span[1]):
            if b > begin and a < end:
                print(f"  {lane:6} {1e6 * (a - begin):7.0f} .. {1e6 * (b - begin):7.0f}  {name}")


def supervisor_link() -> SupervisorLink:
    """Returns the link of a supervised rank, without a supervisor.

    The rank sends heartbeats, which are not read here, and looks for restarted ranks.
    """
    here, there = socket.socketpair()
    there.sendall(encode_first_message(b""))
    there.detach()  # stays open, otherwise this process would end
    return SupervisorClient(here, 0).supervision()


def main() -> None:
    """Decodes twice: without timing for the busy share, with timing for the timelines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=8, help="prompts")
    parser.add_argument("--steps", type=int, default=None, help="d (default: measured)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ops", default="auto", choices=("auto", "reference", "unfused"))
    parser.add_argument("--supervised", action="store_true", help="include the heartbeats to a supervisor")
    add_device_flag(parser)
    args = parser.parse_args()
    check_device(parser, args.device)
    whole = join_world(supervisor=supervisor_link() if args.supervised else None)
    if whole is None or whole.size != 2:
        parser.error("requires two ranks; start it with torchrun --standalone --nproc-per-node 2 -m bench.lanes")
    check_device(parser, args.device, whole.local_size)
    torch.set_num_threads(1)
    options: LoadOptions = {
        "dtype": torch.bfloat16, "ops": args.ops, "device": args.device, "threads": 1, "gpu_trial": "off"
    }  # fmt: skip
    config, spans = EngineConfig("async", draft_steps=args.steps), []
    plain, close = (replace(whole, store=PrefixStore(name, whole.store)) for name in ("plain", "close"))
    if whole.rank:
        serve_rank(plain, *MODELS, config, **options)
        with timed(spans):
            serve_rank(close, *MODELS, config, **options)
        whole.store.set("lane", json.dumps(spans))
        whole.store.get("shown")  # the store ends with rank 0
        return
    llm, busy, tokens = decode(plain, config, options, args.limit, args.temperature)
    print(f"d = {llm.config.initial_draft_steps}: target busy {busy:.3f}, {tokens:.2f} tok/round")
    with timed(spans):
        _, busy, _ = decode(close, config, options, args.limit, args.temperature)
    print(f"with timing: target busy {busy:.3f}")
    show(spans, json.loads(whole.store.get("lane")))
    whole.store.set("shown", "")


if __name__ == "__main__":
    main()
