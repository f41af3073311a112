"""Speed and quality of mode smc against particles N and draft tokens K, on the embedded pair and held-out prompts.

    python -m bench.smc [--particles 1,4,8,64] [--steps 1,4,16] [--ops reference] [--plot docs/smc.svg] [--memory]

Quality is measured: the target's own mean log-likelihood per token of what each configuration wrote (at the request's
temperature), and how far that lies from plain sampling's on the same prompts and seeds, with its standard error. A text
that reads like the draft's lies below. All configurations take turns on every prompt, and times are this thread's CPU
time, so that other work on the machine counts less; only ratios within one run mean much.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from bench.heldout import DEMO, read_prompts
from swiftspec.engine import LLM
from swiftspec.model.loader import load_model
from swiftspec.ops import reference
from swiftspec.params import Plan, PopulationPlan, SamplingParams
from swiftspec.spec import mask
from swiftspec.worker.runner import Runner
from swiftspec.worker.smc import SMC

CONTEXT = 1536


@dataclass
class Result:
    """One configuration's totals; N = 0 is plain sampling. `likelihood` has one mean per request."""

    particles: int
    steps: int
    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    ess: float = 0.0
    resampled: float = 0.0
    coalesced: float = 0.0
    likelihood: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def round_ms(self) -> float:
        return 1000 * self.seconds / self.rounds


def scorer(temperature: float) -> Callable[[Sequence[int], Sequence[int]], float]:
    """The target's mean log-likelihood per token of a text after a prompt."""
    model = load_model(DEMO / "target", dtype=torch.float32, ops=reference, max_positions=2 * CONTEXT)
    runner = Runner(model, reference, context=CONTEXT, tree_slots=CONTEXT)

    def score(prompt: Sequence[int], text: Sequence[int]) -> float:
        runner.reset()
        runner.prefill(prompt[:-1])
        inputs = np.array([prompt[-1], *text[:-1]])
        logits = runner.forward_tree(inputs, np.arange(len(inputs)), mask.causal(len(inputs)))
        log_p = (logits / temperature).log_softmax(-1)
        return float(log_p[torch.arange(len(text)), torch.tensor(text)].mean())

    return score


def build(particles: int, steps: int, args: argparse.Namespace) -> LLM:
    kind: Any = {"dtype": torch.bfloat16, "ops": args.ops, "max_model_len": CONTEXT}
    if particles == 0:
        return LLM(DEMO / "target", plan=Plan("ar"), **kind)
    population = PopulationPlan(particles, steps, args.ess_threshold, args.power)
    return LLM(DEMO / "target", DEMO / "draft", Plan("smc", population=population), **kind)


def measure(args: argparse.Namespace) -> list[Result]:
    """Plain sampling first, then every N and K."""
    shapes = [(0, 0)] + [(n, k) for k in args.steps for n in args.particles]
    systems = [(Result(n, k), build(n, k, args)) for n, k in shapes]
    prompts = read_prompts(AutoTokenizer.from_pretrained(DEMO / "target"))[: args.limit]
    score = scorer(args.temperature)
    for _, llm in systems:
        llm.generate(prompts[0], SamplingParams(temperature=args.temperature, max_tokens=8, ignore_eos=True))
    for seed in range(args.seeds):
        for prompt in prompts:
            sampling = SamplingParams(args.temperature, max_tokens=args.max_tokens, ignore_eos=True, seed=seed)
            for result, llm in systems:
                answer = llm.generate(prompt, sampling)
                stats, end = answer.stats, answer.stats.population
                result.tokens += stats.tokens
                result.rounds += stats.rounds
                result.seconds += stats.decode_time
                result.likelihood.append(score(prompt, answer.token_ids))
                if end is not None:
                    result.ess += end.ess_mean / result.particles
                    result.resampled += end.resample_rate
                    result.coalesced += end.coalesced_prefix / len(answer.token_ids)
    return [result for result, _ in systems]


def line(result: Result, plain: Result) -> str:
    """One row of the table."""
    apart = torch.tensor(result.likelihood) - torch.tensor(plain.likelihood)
    runs = len(apart)
    head = "plain       " if result is plain else f"N={result.particles:<3} K={result.steps:<3}"
    text = f"{head} {result.rate:7.1f} tok/s  {result.rate / plain.rate:5.2f}x  {result.round_ms:7.2f} ms/round"
    text += f"  log p {sum(result.likelihood) / runs:6.3f}"
    if result is not plain:
        text += f" ({float(apart.mean()):+.3f} ± {float(apart.std()) / math.sqrt(runs):.3f})"
        shares = (result.ess / runs, result.resampled / runs, result.coalesced / runs)
        text += "  ESS/N {:.2f}, resampled {:.2f}, coalesced {:.2f}".format(*shares)
    return text


def memory(args: argparse.Namespace) -> None:
    """Cache bytes that 64 particles over a prompt of 1,000 tokens use, beside what copies would."""
    llm = build(64, 4, args)
    smc = llm.smc
    assert isinstance(smc, SMC)
    each = sum(2 * r.cache.k[:, 0, :, 0].numel() * r.cache.k.element_size() for r in (smc.target, smc.draft))
    smc.open([(7 * i) % 4000 + 5 for i in range(1000)], SamplingParams(temperature=args.temperature), (), 64)
    counts = []
    while True:
        counts.append(smc.target.cache.kv_len()[0])
        if not smc.launch():
            break
        smc.collect()
    answer = smc.finish()
    print(f"\n64 particles, prompt of 1,000 tokens, {each} cache bytes a token (both models)")
    print(f"  after the fan-out: {counts[0]} slots, {counts[0] * each / 2**20:.1f} MiB")
    print(f"  most while 64 tokens were added to each: {max(counts)} slots, {max(counts) * each / 2**20:.1f} MiB")
    print(f"  a copy for each particle: {64 * 1064} slots, {64 * 1064 * each / 2**20:.1f} MiB")
    print(
        f"  KV moved by fan-out and resampling ({int(smc.particles.resampled)} times): none; by {answer.compactions}"
        f" compactions: {answer.moved_slots} slots"
    )


def plot(results: Sequence[Result], file: Path) -> None:
    """Distance in likelihood against speed, a line for each K: an SVG without a library."""
    plain, rest = results[0], results[1:]
    points = {(r.particles, r.steps): (r.rate / plain.rate, difference(r, plain)) for r in rest}
    xs, ys = [x for x, _ in points.values()], [y for _, y in points.values()]
    right, low, high = 1.1 * max([1.0, *xs]), min([-0.1, *ys]) * 1.1, max([0.1, *ys]) * 1.1

    def at(x: float, y: float) -> tuple[float, float]:
        return 70 + 540 * x / right, 20 + 340 * (high - y) / (high - low)

    colours = ("#1b6ca8", "#d1495b", "#3a7d44", "#b07d12", "#6a4c93")
    out = ['<svg xmlns="http://www.w3.org/2000/svg" width="640" height="410" font-family="sans-serif" font-size="12">']
    out.append('<rect width="640" height="410" fill="white"/>')
    for x0, y0, x1, y1 in ((0, 0, right, 0), (1, low, 1, high)):
        (a, b), (c, d) = at(x0, y0), at(x1, y1)
        out.append(f'<line x1="{a:.0f}" y1="{b:.0f}" x2="{c:.0f}" y2="{d:.0f}" stroke="#bbb"/>')
    for index, steps in enumerate(sorted({r.steps for r in rest})):
        colour = colours[index % len(colours)]
        mine = [(r.particles, *at(*points[r.particles, steps])) for r in rest if r.steps == steps]
        path = " ".join(f"{x:.0f},{y:.0f}" for _, x, y in mine)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
        out += [f'<text x="{x + 4:.0f}" y="{y - 4:.0f}" fill="{colour}">{n}</text>' for n, x, y in mine]
        out.append(f'<text x="{90 + 70 * index}" y="38" fill="{colour}">K = {steps}</text>')
    out.append('<text x="250" y="400">speed, times plain sampling (numbers: N)</text>')
    out.append('<text transform="translate(18 300) rotate(-90)">log p per token, above plain sampling</text>')
    for y in (low, 0.0, high):
        out.append(f'<text x="30" y="{at(0, y)[1] + 4:.0f}">{y:+.2f}</text>')
    for x in (0.0, 1.0, right):
        out.append(f'<text x="{at(x, 0)[0] - 8:.0f}" y="378">{x:.1f}</text>')
    file.write_text("\n".join([*out, "</svg>\n"]), encoding="utf-8")


def difference(result: Result, plain: Result) -> float:
    return (sum(result.likelihood) - sum(plain.likelihood)) / len(plain.likelihood)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Prints the table; the ratio of rounds where N = 1 and 8 are among the shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--particles", type=numbers, default=[1, 2, 4, 8, 16, 64])
    parser.add_argument("--steps", type=numbers, default=[1, 4, 16])
    parser.add_argument("--ops", choices=("auto", "reference"), default="auto")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--power", type=float, default=1.0)
    parser.add_argument("--ess-threshold", type=float, default=0.5)
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    time.perf_counter = time.thread_time  # the engine's clock; one thread does all the work here
    if args.memory:
        memory(args)
        return
    results = measure(args)
    for result in results:
        print(line(result, results[0]))
    rounds = {(r.particles, r.steps): r.round_ms for r in results}
    for steps in args.steps:
        if (1, steps) in rounds and (8, steps) in rounds:
            print(f"K={steps}: a round of N=8 takes {rounds[8, steps] / rounds[1, steps]:.2f} times one of N=1")
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results]))
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
