"""Tokens per round of every kind of proposal against temperature and top-p, in serial and asynchronous mode, on
held-out prompts.

    python -m bench.proposals [--limit 24] [--plot docs/proposals.svg] [--json out.json]
    python -m bench.proposals --calibration 0.4,0.5 --proposals top --temperatures 0    # varies the constant
    python -m bench.proposals --same-text --limit 50    # separates the effect of sampled text from that of sampling

Runs in one process, since for a fixed d `LookaheadDrafter` gives the same rounds as two groups of ranks. No time is
measured. `coupled` and `top` are verified by token equality, `sample` by rejection. At temperature 0 `coupled` equals
`top`, and `sample` is not defined.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import torch
from transformers import AutoTokenizer

from bench.common.roles import decode_on, growing_ahead, local_roles
from bench.data.heldout import DEMO, read_prompts
from bench.figure import svg_axes
from swiftspec.config import PROPOSAL_METHODS, EngineConfig
from swiftspec.decode import decode
from swiftspec.llm_engine import LLMEngine
from swiftspec.messages import RequestStart
from swiftspec.params import SamplingParams
from swiftspec.runtime.lookahead_drafter import LookaheadDrafter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"top": "#d1495b", "coupled": "#1b6ca8", "sample": "#3a7d44"}


@dataclass(frozen=True)
class Point:
    """Tokens per round (`ratio`) of one configuration. `ahead`: asynchronous instead of serial mode."""

    proposal: str
    ahead: bool
    temperature: float
    top_p: float
    calibration: float | None
    ratio: float


def engine(proposal: str, ahead: bool, calibration: float | None, args: argparse.Namespace) -> LLMEngine:
    """Builds the engine of the demo models with a serial or a lookahead drafter."""
    verify = "reject" if proposal == "sample" else "match"
    config = EngineConfig(draft_steps=args.ahead_steps if ahead else args.steps, proposal=proposal, verify=verify,
                calibration=calibration)  # fmt: skip
    llm = LLMEngine(DEMO / "target", DEMO / "draft", config, dtype=torch.bfloat16, device="cpu", threads=1)
    if ahead:
        drafter, verifier = local_roles(llm)
        decode_on(llm, growing_ahead(drafter, config, LookaheadDrafter), verifier)
    return llm


def ratio(
    llm: LLMEngine, prompts: Sequence[list[int]], temperature: float, top_p: float, args: argparse.Namespace
) -> float:
    """Returns the tokens per round over all prompts and seeds."""
    tokens = rounds = 0
    for seed, prompt in product(range(args.seeds), prompts):
        sampling = SamplingParams(
            temperature=temperature, top_p=top_p, max_tokens=args.max_tokens, ignore_eos=True, seed=seed
        )
        answer = llm.generate(prompt, sampling)
        tokens += len(answer.token_ids)
        rounds += answer.stats.rounds
    return tokens / rounds


def measure(args: argparse.Namespace) -> Iterator[Point]:
    """Yields the results of all configurations, as they are measured."""
    prompts = read_prompts(AutoTokenizer.from_pretrained(DEMO / "target"))[: args.limit]
    for proposal, ahead, calibration in product(args.proposals, args.ahead, args.calibration):
        llm = engine(proposal, ahead, calibration, args)
        for temperature, top_p in product(args.temperatures, args.top_p):
            if temperature == 0 and (proposal == "sample" or top_p < 1):
                continue
            found = ratio(llm, prompts, temperature, top_p, args)
            yield Point(proposal, ahead, temperature, top_p, calibration, round(found, 3))


def same_text(args: argparse.Namespace) -> None:
    """Prints the mean tokens of single rounds with coupled trees in serial mode, at positions of greedy and of sampled
    texts.

    At each position one round runs at temperature 0 and one at temperature 1, so that both continue the same text.
    """
    prompts = read_prompts(AutoTokenizer.from_pretrained(DEMO / "target"))[: args.limit]
    llm = engine("coupled", False, None, args)
    drafter, verifier = local_roles(llm)
    laws = {temperature: SamplingParams(temperature=temperature, max_tokens=args.max_tokens, ignore_eos=True)
            for temperature in (0.0, 1.0)}  # fmt: skip
    for source, sampling in laws.items():
        found: dict[float, list[int]] = {temperature: [] for temperature in laws}
        for seed, prompt in enumerate(prompts):
            text = llm.generate(prompt, replace(sampling, seed=seed)).token_ids
            for at, temperature in product(range(4, len(text), 8), laws):
                tokens = (*prompt, *text[:at])
                # a separate seed, so that the text does not depend on the noise of the measured round
                fresh = replace(laws[temperature], seed=len(prompts) + seed)
                for role in (drafter, verifier):
                    role.open(RequestStart(1, tokens, fresh, len(prompt)))
                _, result = next(decode(drafter, verifier))
                found[temperature].append(len(result.tokens))
        for temperature, counts in found.items():
            error = stdev(counts) / len(counts) ** 0.5
            print(f"text at T {source:g}, rounds at T {temperature:g}: {fmean(counts):.3f} +- {error:.3f} tokens")


def draw(axes: Axes, points: Sequence[Point]) -> None:
    """Draws tokens per round in serial mode against temperature: a line per proposal, dashed for top-p below 1."""
    in_turn = [point for point in points if not point.ahead]
    for proposal, top_p in sorted({(p.proposal, p.top_p) for p in in_turn}):
        mine = sorted((p.temperature, p.ratio) for p in in_turn if (p.proposal, p.top_p) == (proposal, top_p))
        style, label = ("--", None) if top_p < 1 else ("-", proposal)
        axes.plot(*zip(*mine), style, color=COLOURS[proposal], label=label)
    axes.set(xlabel="temperature (dashed: top-p below 1)", ylabel="tokens per round", ylim=(1, None))
    axes.legend(frameon=False)


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    """Prints one row per configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--proposals", type=lambda text: text.split(","), default=list(PROPOSAL_METHODS))
    parser.add_argument("--temperatures", type=numbers, default=[0, 0.3, 0.7, 1.0, 1.3])
    parser.add_argument("--top-p", type=numbers, default=[1.0, 0.9])
    parser.add_argument("--calibration", type=numbers, default=[None])
    parser.add_argument("--ahead", type=lambda text: [word == "yes" for word in text.split(",")], default=[False, True],
                        help="no, yes, or no,yes (default: no,yes)")  # fmt: skip
    parser.add_argument("--steps", type=int, default=4, help="largest d; every d up to it is measured")
    parser.add_argument("--ahead-steps", type=int, default=8, help="d when drafting ahead")
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--same-text", action="store_true", help="single rounds at temperatures 0 and 1 on equal text")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.same_text:
        same_text(args)
        return
    points = []
    for p in measure(args):
        points.append(p)
        lane, constant = "ahead" if p.ahead else "serial", "" if p.calibration is None else f"  c {p.calibration}"
        print(f"{p.proposal:8} {lane:7} T {p.temperature:g}  top-p {p.top_p:g}{constant}  {p.ratio:.3f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(point) for point in points], indent=1) + "\n")
    if args.plot:
        with svg_axes(args.plot) as axes:
            draw(axes, points)


if __name__ == "__main__":
    main()
