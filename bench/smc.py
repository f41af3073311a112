"""Speed and quality of mode smc against particles N and draft tokens K, on the demo models and held-out prompts.

    python -m bench.smc [--particles 1,4,8] [--steps 4] [--ops reference] [--threads 2] [--memory]
    python -m bench.smc --limit 8 --seeds 4 --plot docs/smc.svg    # the figure
    python -m bench.smc --groups 1,2,4,8 --particles 4 --steps 4   # concurrent requests

Quality is the target's mean log-likelihood per token of each configuration's text (at the request's temperature), as
its distance from the mean of several plain samples of the same prompt, with its standard error. A text that resembles
the draft's own has a negative distance. All configurations alternate on every prompt. One thread is timed by its CPU
time, which other work on the machine affects less; several threads and a GPU (`--device cuda`, not run yet) are timed
by the wall clock. Only ratios within one run are meaningful.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoTokenizer

from bench.data.heldout import DEMO, read_prompts
from bench.figure import scale_speeds, svg_axes
from bench.smc_groups import add_flags, compare
from swiftspec.backends.reference import reference
from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.engine import Completion
from swiftspec.llm_engine import LLMEngine
from swiftspec.messages import RequestStart
from swiftspec.model.loader import load_model
from swiftspec.params import SamplingParams
from swiftspec.runtime.runner import Runner
from swiftspec.smc.scheduler import BatchScheduler
from swiftspec.tree import mask

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONTEXT = 1536
PLAIN = 8  # plain texts per request: they are fast, and every distance is relative to their mean
Y_AXIS = "log p per token, relative to plain sampling (± standard error)"


@dataclass
class Result:
    """Totals of one configuration. `particles`: N, 0 for plain sampling. `steps`: K.

    `likelihood` has one mean per request: of one text, or of PLAIN texts for plain sampling.
    """

    particles: int
    steps: int
    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    ess: float = 0.0
    resampled: float = 0.0
    coalesced: float = 0.0
    likelihood: list[float] = field(default_factory=list)

    def add(self, answer: Completion) -> None:
        stats, end = answer.stats, answer.stats.population
        self.tokens += stats.tokens
        self.rounds += stats.rounds
        self.seconds += stats.decode_time
        if end is not None:
            self.ess += end.ess_mean / self.particles
            self.resampled += end.resample_rate
            self.coalesced += end.coalesced_prefix / len(answer.token_ids)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def round_ms(self) -> float:
        return 1000 * self.seconds / self.rounds


def scorer(temperature: float, target: Path = DEMO / "target") -> Callable[[Sequence[int], Sequence[int]], float]:
    """Returns a function that computes the target's mean log-likelihood per token of a text after a prompt."""
    model = load_model(target, dtype=torch.float32, ops=reference, max_positions=2 * CONTEXT)
    runner = Runner(model, reference, model.spec.vocab_size, context=CONTEXT, tree_slots=CONTEXT)

    def score(prompt: Sequence[int], text: Sequence[int]) -> float:
        runner.cache.reset()
        runner.prefill(prompt[:-1])
        inputs = np.array([prompt[-1], *text[:-1]])
        logits = runner.logits(runner.tree_batch(inputs, np.arange(len(inputs)), mask.causal(len(inputs))))
        log_p = (logits / temperature).log_softmax(-1)
        return float(log_p[torch.arange(len(text)), torch.tensor(text)].mean())

    return score


def build(particles: int, steps: int, args: argparse.Namespace) -> LLMEngine:
    kind: Any = {"dtype": torch.bfloat16, "ops": args.ops, "max_model_len": CONTEXT, "device": args.device}
    kind["threads"] = args.threads
    if particles == 0:
        return LLMEngine(DEMO / "target", config=EngineConfig("ar"), **kind)
    population = PopulationConfig(particles, steps, args.ess_threshold, args.power)
    return LLMEngine(DEMO / "target", DEMO / "draft", EngineConfig("smc", population=population), **kind)


def measure(args: argparse.Namespace) -> list[Result]:
    """Returns the totals of plain sampling, then of every N and K."""
    shapes = [(0, 0)] + [(n, k) for k in args.steps for n in args.particles]
    systems = [(Result(n, k), build(n, k, args)) for n, k in shapes]
    prompts = read_prompts(AutoTokenizer.from_pretrained(DEMO / "target"))[: args.limit]
    score = scorer(args.temperature)
    warm = 8 if args.device == "cpu" else args.max_tokens  # on a GPU the warm-up must include graph capture
    for _, llm in systems:
        llm.generate(prompts[0], SamplingParams(temperature=args.temperature, max_tokens=warm, ignore_eos=True))
    for seed in range(args.seeds):
        for prompt in prompts:
            for result, llm in systems:
                texts = PLAIN if result.particles == 0 else 1
                found = []
                for turn in range(texts):
                    sampling = SamplingParams(
                        args.temperature, max_tokens=args.max_tokens, ignore_eos=True, seed=texts * seed + turn
                    )
                    answer = llm.generate(prompt, sampling)
                    result.add(answer)
                    found.append(score(prompt, answer.token_ids))
                result.likelihood.append(sum(found) / texts)
    return [result for result, _ in systems]


def line(result: Result, plain: Result) -> str:
    """Formats one row of the table."""
    runs = len(result.likelihood)
    head = "plain       " if result is plain else f"N={result.particles:<3} K={result.steps:<3}"
    text = f"{head} {result.rate:7.1f} tok/s  {result.rate / plain.rate:5.2f}x  {result.round_ms:7.2f} ms/round"
    text += f"  log p {sum(result.likelihood) / runs:6.3f}"
    if result is not plain:
        text += " ({:+.3f} ± {:.3f})".format(*distance(result, plain))
        shares = (result.ess / runs, result.resampled / runs, result.coalesced / runs)
        text += "  ESS/N {:.2f}, resampled {:.2f}, coalesced {:.2f}".format(*shares)
    return text


def table(results: Sequence[Result]) -> str:
    """Formats speed and distance for every N (rows) and K (columns) as Markdown."""
    plain, rest = results[0], results[1:]
    ks = sorted({r.steps for r in rest})
    cells = {(r.particles, r.steps): (r.rate / plain.rate, *distance(r, plain)) for r in rest}
    rows = [["N", f"K = {ks[0]}: speed, log p", *(f"K = {steps}" for steps in ks[1:])], ["---"] * (1 + len(ks))]
    for n in sorted({r.particles for r in rest}):
        rows.append([str(n), *("{:.2f}x, {:+.2f} ± {:.2f}".format(*cells[n, steps]) for steps in ks)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def memory(args: argparse.Namespace) -> None:
    """Prints the KV cache bytes of 64 particles on a prompt of 1,000 tokens, and those of a separate copy for each
    particle."""
    llm = build(64, 4, args)
    smc = llm.roles.inner_roles
    assert isinstance(smc, BatchScheduler)
    particles = smc.round.particles
    each = sum(2 * r.cache.kv.k[:, 0, :, 0].numel() * r.cache.kv.k.element_size() for r in (smc.target, smc.draft))
    prompt = tuple((7 * i) % 4000 + 5 for i in range(1000))
    group = smc.admit(RequestStart(1, prompt, SamplingParams(temperature=args.temperature), len(prompt)), (), 64)
    counts = [len(prompt)]
    while smc.launch():
        smc.collect()
        counts.append(smc.target.cache.prefix_len[group.sequence] + group.region.used_slots)
    answer = smc.finish(group)
    print(f"\n64 particles, prompt of 1,000 tokens, {each} cache bytes per token (both models)")
    print(f"  after fan-out: {counts[0]} slots, {counts[0] * each / 2**20:.1f} MiB")
    print(f"  maximum while 64 tokens were added to each: {max(counts)} slots, {max(counts) * each / 2**20:.1f} MiB")
    print(f"  with a copy per particle: {64 * 1064} slots, {64 * 1064 * each / 2**20:.1f} MiB")
    print(
        f"  KV moved by fan-out and resampling ({int(particles.resampled)} times): none; by {answer.compactions}"
        f" compactions: {answer.moved_slots} slots"
    )


def draw(axes: Axes, results: Sequence[Result], title: str) -> None:
    """Draws distance in likelihood against speed, one line per K, with N at each point."""
    plain, rest = results[0], results[1:]
    for steps in sorted({r.steps for r in rest}):
        mine = [r for r in rest if r.steps == steps]
        speeds, distances = [r.rate / plain.rate for r in mine], [distance(r, plain) for r in mine]
        means, errors = zip(*distances)
        axes.errorbar(speeds, means, errors, marker="o", markersize=4, label=f"K = {steps}")
        for result, speed, mean in zip(mine, speeds, means):
            axes.annotate(str(result.particles), (speed, mean), (4, 4), textcoords="offset points")
    axes.axvline(1, color="#999", linewidth=0.8)
    axes.axhline(0, color="#999", linewidth=0.8)
    scale_speeds(axes)
    axes.set(title=title, xlabel="tokens per second relative to plain sampling; numbers: N", ylabel=Y_AXIS)
    axes.legend(frameon=False)


def distance(result: Result, plain: Result) -> tuple[float, float]:
    """Returns the mean over the requests of the difference from the log-likelihood of plain sampling, and its standard
    error."""
    apart = np.array(result.likelihood) - np.array(plain.likelihood)
    return float(apart.mean()), float(apart.std(ddof=1)) / math.sqrt(len(apart)) if len(apart) > 1 else math.nan


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Prints the table, and for each K the ratio of the times of a round with N = 8 and N = 1 if both are measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--particles", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--steps", type=numbers, default=[1, 4, 16])
    parser.add_argument("--ops", choices=("auto", "reference"), default="auto")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch operators (for reference ops)")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--power", type=float, default=1.0)
    parser.add_argument("--ess-threshold", type=float, default=0.5)
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--groups", type=numbers, help="numbers of concurrent requests; measures only their speed")
    add_flags(parser, DEMO / "target", DEMO / "draft")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if min(args.threads, args.limit, *args.particles) < 1:
        parser.error("--threads, --limit and --particles must be at least 1")
    torch.set_num_threads(args.threads)
    if args.threads == 1 and args.device == "cpu":
        time.perf_counter = time.thread_time  # clock of the engine; on a GPU the host waits while the GPU computes
    if args.memory:
        memory(args)
        return
    if args.groups:
        compare(read_prompts(AutoTokenizer.from_pretrained(DEMO / "target")), args)
        return
    results = measure(args)
    for result in results:
        print(line(result, results[0]))
    rounds = {(r.particles, r.steps): r.round_ms for r in results}
    for steps in args.steps:
        if (1, steps) in rounds and (8, steps) in rounds:
            print(f"K={steps}: a round of N=8 takes {rounds[8, steps] / rounds[1, steps]:.2f}x as long as one of N=1")
    print(f"\n{table(results)}")
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results]))
    if args.plot:
        requests = len(results[0].likelihood)
        title = f"mode smc on the embedded pair, temperature {args.temperature:g}, power {args.power:g}"
        with svg_axes(args.plot) as axes:
            draw(axes, results, f"{title}, {requests} requests of {args.max_tokens} tokens")


if __name__ == "__main__":
    main()
