"""Concurrent requests of mode smc: total tokens per second. Started by `bench.smc`.

For every number G of concurrent requests, the same requests of equal length are decoded; there are twice the largest G
of them, and the next one joins as soon as one ends. The speed excludes the time of prefill. `own` is the cost of a
round beyond its forwards, relative to the forwards. `plain` is an upper bound for any batch without a draft: the
target's forwards alone, with one row per request. All shapes and all G alternate.

`--ablate` runs particles with all optimizations and then without one at a time: the deferred bonus (without it the
draft reads the last token of a round in a separate forward), the late host (without it the host reads a round before it
begins the next), and the round in one call (native or graph; without it operator by operator).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.figure import svg_axes
from swiftspec.batching.batch_request import BatchRequest
from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.batch import Batch
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors.graph import CudaCapture
from swiftspec.smc.scheduler import BatchScheduler

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ABLATED = ("deferred bonus", "late host", "round in one call")
Shape = tuple[int, int, str]  # N, K and the optimization that is left out
PROMPT = 64  # tokens per prompt
WINDOW = 16  # width of the mask in `plain`, in slots


@dataclass
class Total:
    """Totals of one shape with one number of concurrent requests."""

    tokens: int = 0
    rounds: int = 0  # summed over the requests
    seconds: float = 0.0
    forwards: float = 0.0  # seconds in forwards
    rates: list[float] = field(default_factory=list)  # tokens per second of each run

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def own(self) -> str:
        """Cost of the rounds beyond their forwards, as a percentage of the forwards; "-" on a GPU, where that is
        unknown."""
        return "-" if self.forwards <= 0 else f"{100 * (self.seconds / self.forwards - 1):.1f} %"


def build(particles: int, steps: int, without: str, args: argparse.Namespace) -> LLMEngine:
    """Builds an engine with room for the largest number of requests. `without`: one of ABLATED, or empty."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "ops": args.ops, "max_model_len": 1536, "device": args.device}
    options |= {"threads": 1, "gpu_trial": "off"}
    most = max(2, *args.groups)  # requests on a single sequence have no `BatchRequest.busy_before`
    shape = PopulationConfig(particles, steps, args.ess_threshold, args.power, smc_groups=most)
    shape = replace(shape, deferred_bonus=without != "deferred bonus")
    llm = LLMEngine(args.target, args.draft, EngineConfig("smc", population=shape), **options)
    population = llm.roles.inner_roles
    assert isinstance(population, BatchScheduler)
    if args.rounds is not None:
        keep_executor(population, args.rounds)
    if args.lag is not None:
        population.lag = args.lag
    if args.ablate:
        leave_out(population, without)
    return llm


def keep_executor(population: BatchScheduler, name: str) -> None:
    """Removes all executors but this one and the eager one."""
    population.executors = [known for known in population.executors if known.name in (name, "eager")]


def leave_out(population: BatchScheduler, without: str) -> None:
    """Disables one of ABLATED in a population, if it is not the deferred bonus, which the engine's configuration
    disables."""
    population.lag = int(without != "late host")
    if without == "round in one call":
        keep_executor(population, "eager")


def run(llm: LLMEngine, prompts: Sequence[Sequence[int]], args: argparse.Namespace, at_once: int, total: Total) -> None:
    """Decodes the requests, at most `at_once` at a time, and adds the measurements to `total`."""
    sampling = [
        SamplingParams(args.temperature, max_tokens=args.max_tokens, ignore_eos=True, seed=i)
        for i in range(len(prompts))
    ]
    requests = [llm.request(i, *asked) for i, asked in enumerate(zip(prompts, sampling, strict=True))]
    waiting, here, decoding = iter(requests), 0, llm.roles.decoding
    came: list[float] = []  # seconds in forwards until each request arrived

    def arriving() -> BatchRequest | None:
        nonlocal here
        request = None if here == at_once else next(waiting, None)
        if request is not None:
            here += 1
            came.append(sum(decoding.busy))
        return request

    began, busy = time.perf_counter(), sum(decoding.busy)
    for _, chunk in llm.run_batch(arriving, lambda request: False):
        here -= chunk.finish_reason is not None
    prompts_read = sum(sum(request.busy_before) for request in requests) - sum(came)
    reading = sum(request.stats.prompt_time for request in requests)
    seconds = time.perf_counter() - began - reading
    tokens = sum(request.stats.tokens for request in requests)
    total.rates.append(tokens / seconds)
    total.tokens, total.seconds = total.tokens + tokens, total.seconds + seconds
    if args.device == "cpu":  # on a GPU the host only knows when forwards begin
        total.forwards += sum(decoding.busy) - busy - prompts_read
    total.rounds += sum(request.stats.rounds for request in requests)


def plain(llm: LLMEngine, at_once: int, forwards: int = 8) -> float:
    """Returns the tokens per second of target forwards with one row for each of `at_once` requests.

    The prompts are those that earlier requests left in the cache. The time is the median of `forwards` forwards.
    """
    population = llm.roles.inner_roles
    assert isinstance(population, BatchScheduler)
    target = population.target
    device, cache = target.model.device, target.cache
    mask = torch.zeros(at_once, WINDOW, dtype=torch.bool, device=device)
    mask[:, 0] = True
    rows = torch.arange(at_once, device=device)
    after = torch.full_like(rows, PROMPT)
    ends = torch.full((len(cache.prefix_len),), PROMPT + WINDOW, device=device)
    batch, seconds = Batch(rows, after, after, mask, rows, ends), []

    def forward() -> Tensor:
        logits = target.model.forward(batch, cache).logits
        assert logits is not None
        return logits

    work: Callable[[], object] = forward
    if population.executors[0].name == "graph":
        _, work = CudaCapture(Lock(), device)(forward)
    for _ in range(forwards):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return at_once / statistics.median(seconds)


def compare(prompts: Sequence[Sequence[int]], args: argparse.Namespace) -> None:
    """Prints one line of `plain` for each G, then one line for each N, K, left-out optimization and G."""
    left_out = ["", *ABLATED] if args.ablate else [""]
    shapes: list[Shape] = [(n, k, without) for k in args.steps for n in args.particles for without in left_out]
    systems = {shape: build(*shape, args) for shape in shapes}
    asked = [prompts[i % len(prompts)][:PROMPT] for i in range(2 * max(args.groups))]
    totals = {(shape, count): Total() for shape in shapes for count in args.groups}
    for llm in systems.values():
        llm.generate(asked[0], SamplingParams(args.temperature, max_tokens=8, ignore_eos=True))
    if args.device != "cpu":  # otherwise the timing would include graph capture
        for shape, count in totals:
            run(systems[shape], asked, args, count, Total())
    alone: dict[int, list[float]] = {count: [] for count in args.groups}
    for _ in range(args.seeds):
        for (shape, count), total in totals.items():
            run(systems[shape], asked, args, count, total)
        for count, found in alone.items():
            found.append(plain(systems[shapes[0]], count))
    rate_alone = {count: statistics.mean(found) for count, found in alone.items()}
    for count, rate in rate_alone.items():
        print(f"plain {'':11} G={count:<3} {rate:7.1f} tok/s  {rate / rate_alone[min(args.groups)]:5.2f}x")
    for (shape, count), total in totals.items():
        first = totals[shape, min(args.groups)].rate
        particles, steps, without = shape
        print(
            f"smc   N={particles:<3} K={steps:<3} G={count:<3} {total.rate:7.1f} tok/s ({min(total.rates):.1f} to"
            f" {max(total.rates):.1f})  {total.rate / first:5.2f}x  {total.tokens / total.rounds:.2f} tok/round"
            f"  own {total.own}{without and f'  without the {without}'}"
        )
    if args.plot is not None:
        rates = {
            f"N = {n}, K = {k}{without and f', without the {without}'}": [
                totals[(n, k, without), g].rate for g in args.groups
            ]
            for n, k, without in shapes
        }
        with svg_axes(args.plot) as axes:
            draw(axes, args.groups, {**rates, "plain": [rate_alone[g] for g in args.groups]})


def draw(axes: Axes, groups: Sequence[int], rates: Mapping[str, Sequence[float]]) -> None:
    """Draws total tokens per second against the number of concurrent requests."""
    for name, mine in rates.items():
        axes.plot(groups, mine, marker="o", markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(groups, [str(count) for count in groups])
    axes.set(xlabel="concurrent requests", ylabel="total tokens per second", ylim=(0, None))
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15))


def add_flags(parser: argparse.ArgumentParser, target: Path, draft: Path) -> None:
    """Adds the flags of this module."""
    parser.add_argument("--target", type=Path, default=target, help="target, such as one of tools.width_expand")
    parser.add_argument("--draft", type=Path, default=draft)
    parser.add_argument("--device", default="cpu", help="device of the models: cpu or cuda")
    parser.add_argument(
        "--rounds",
        choices=("native", "graph", "eager"),
        help="with --groups: measure only this executor and the eager one",
    )
    parser.add_argument("--lag", type=int, choices=(0, 1), help="with --groups: rounds by which the host lags")
    parser.add_argument("--ablate", action="store_true", help="with --groups: also disable one optimization at a time")
