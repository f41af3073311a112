"""Compares adaptive with fixed tree shapes on prompts whose text is first predictable and then unpredictable.

    python -m bench.adapt [--limit 8] [--max-tokens 128] [--self-switch] [--sets 5] [--no-fixed]

Runs the rounds of the demo models in serial and asynchronous mode on a simulated clock, which advances by a given time
per verification and per expansion, so the result does not depend on the machine or its load. In asynchronous mode draft
and target have separate timelines of one clock, like two groups of ranks. The predictable half of the prompts continues
a table (greedy); the other half is held-out code at temperature 1.5. Without adaptation bs is 8, and d is 3 in serial
mode and follows from the step times in asynchronous mode. The best fixed shape for each half is printed as well. With
several sets of prompts (`--sets`) the standard error of the speedup is printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import TypeVar

import torch
from transformers import AutoTokenizer

from bench.common.roles import growing_ahead, local_roles
from bench.data.heldout import DEMO, read_prompts
from swiftspec.config import EngineConfig
from swiftspec.control.controller import Controller
from swiftspec.control.round_stats import RoundStats
from swiftspec.control.step_times import DraftTimes, steps_for
from swiftspec.decode import decode
from swiftspec.llm_engine import LLMEngine
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.runtime.drafter import Drafter
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.lookahead_drafter import LookaheadDrafter
from swiftspec.runtime.verifier import Verifier

TIMES = {  # milliseconds: target forward over 1 row, over 8 rows, one expansion
    "expensive draft (paper, Table 6)": (10.34, 10.34, 3.73),
    "cheap draft": (10.0, 10.0, 0.8),
    "expensive rows": (4.0, 10.0, 1.0),
    "very expensive rows": (4.0, 20.0, 2.0),
}
FIXED = [(d, bs) for bs in (8, 4, 2) for d in (1, 2, 3, 4, 6, 8, 12)]
# milliseconds from a result to the next proposal of an asynchronous draft: re-rooting, best sub-tree, two messages
TURN = 0.15
T = TypeVar("T")
ROW = "    [" + ", ".join(["{0}"] * 8) + "],\n"


@dataclass(slots=True)
class Clock:
    """Simulated clock in milliseconds, advanced only by the time that a model would have taken."""

    one: float  # target forward over one row
    eight: float  # the same over eight rows
    expansion: float
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class TimedDrafter:
    """Serial drafter whose proposals advance the clock by the time of d expansions."""

    lost_reason = None

    def __init__(self, drafter: LocalDrafter, clock: Clock) -> None:
        self._drafter, self._clock = drafter, clock
        self.busy = 0.0
        self.open, self.grow, self.observe, self.close = drafter.open, drafter.grow, drafter.observe, drafter.close

    @property
    def draft_steps(self) -> int:
        """Number of expansions per round (d)."""
        return self._drafter.draft_steps

    @draft_steps.setter
    def draft_steps(self, steps: int) -> None:
        self._drafter.draft_steps = steps

    def propose(self) -> Proposal:
        spent = self.draft_steps * self._clock.expansion
        self.busy += spent
        self._clock.now += spent
        return self._drafter.propose()


class Counted(LookaheadDrafter):
    """Lookahead drafter that counts its expansions."""

    made = 0

    def expand(self, count: int = 1) -> None:
        self.made += count
        super().expand(count)


class TimedAhead:
    """Lookahead drafter on a timeline of its own, as if it ran on a separate draft group.

    It handles a verification result when its earlier expansions have finished: it answers with the next proposal and
    then runs d more expansions. A new d therefore takes effect at the next result.
    """

    lost_reason = None

    def __init__(self, drafter: Counted, clock: Clock) -> None:
        self._drafter, self._clock = drafter, clock
        self.busy = 0.0
        self._free = 0.0  # time at which the timeline becomes idle
        self.grow, self.close = lambda: None, drafter.close

    @property
    def draft_steps(self) -> int:
        """Number of expansions per round (d)."""
        return self._drafter.draft_steps

    @draft_steps.setter
    def draft_steps(self, steps: int) -> None:
        self._drafter.draft_steps = steps

    def open(self, start: RequestStart) -> None:
        self._free = max(self._free, self._clock.now)
        self._spend(lambda: self._drafter.open(start))
        self._answer()

    def propose(self) -> Proposal:
        self._clock.now = max(self._clock.now, self._answered)
        self.busy = self._told
        return self._proposal

    def observe(self, result: VerifyResult) -> None:
        self._free = max(self._free, self._clock.now) + TURN
        self._drafter.observe(result)
        self._answer()

    def _answer(self) -> None:
        self._proposal = self._spend(self._drafter.propose)
        self._answered, self._told = self._free, self._clock.expansion * self._drafter.made
        self._spend(self._drafter.grow)

    def _spend(self, act: Callable[[], T]) -> T:
        before = self._drafter.made
        made = act()
        self._free += (self._drafter.made - before) * self._clock.expansion
        return made


class TimedVerifier:
    """Verifier whose forwards advance the clock by a time that grows linearly with the number of rows."""

    def __init__(self, verifier: Verifier, clock: Clock) -> None:
        self._verifier, self.clock = verifier, clock
        self.open, self.settle, self.close = verifier.open, verifier.settle, verifier.close

    @property
    def busy(self) -> float:
        return self._verifier.busy

    def submit(self, proposal: Proposal) -> TimedVerifier:
        self._proposal = proposal
        return self

    def wait(self) -> VerifyResult:
        one, eight = self.clock.one, self.clock.eight
        self.clock.now += one + (eight - one) * (len(self._proposal.tokens) - 1) / 7
        return self._verifier.submit(self._proposal).wait()


@dataclass(frozen=True, slots=True)
class Half:
    """One half of a set: prompts of one kind and their sampling parameters."""

    name: str
    prompts: list[list[int]]
    sampling: SamplingParams


def halves(limit: int, sets: int) -> list[list[Half]]:
    """Returns `sets` pairs of halves: `limit` predictable prompts and `limit` unpredictable ones."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    tables = [tokenizer("table = [\n" + ROW.format(n) * 10)["input_ids"] for n in range(limit * sets)]
    code = read_prompts(tokenizer)
    return [
        [
            Half("predictable", tables[first : first + limit], SamplingParams(temperature=0)),
            Half("unpredictable", code[first : first + limit], SamplingParams(temperature=1.5)),
        ]
        for first in range(0, limit * sets, limit)
    ]


def speed(
    half: Half, timed: TimedDrafter | TimedAhead, verifier: TimedVerifier, measured: RoundStats | None, tokens: int
) -> float:
    """Decodes the prompts of a half and returns the tokens per second of simulated time.

    `measured`: statistics from which a controller adapts the tree shape, or None to keep the shape. `tokens`: minimum
    number of tokens per prompt.
    """
    clock = verifier.clock
    began, count = clock.now, 0
    for number, prompt in enumerate(half.prompts):
        drafter: Drafter = timed if measured is None else Controller(timed, lambda kind: measured, clock=clock)
        start = RequestStart(number, tuple(prompt), half.sampling, len(prompt))
        drafter.open(start)
        verifier.open(start)
        there = count
        for _, result in decode(drafter, verifier):
            count += len(result.tokens)
            if count - there >= tokens:
                break
        drafter.close()
        verifier.close()
    return 1e3 * count / (clock.now - began)


def run(
    plan: EngineConfig, times: Sequence[float], adapting: bool, texts: Sequence[Half], tokens: int
) -> list[tuple[float, str]]:
    """Decodes every half and returns its tokens per second and its final tree shape (empty without adaptation)."""
    alone = replace(plan, mode="serial", adapt_steps=True)  # a tree with slots for any d
    llm = LLMEngine(DEMO / "target", DEMO / "draft", alone, dtype=torch.bfloat16, device="cpu", threads=1)
    clock = Clock(*times)
    drafter, verifier = local_roles(llm)
    timed = TimedDrafter(drafter, clock)
    if plan.mode == "async":
        timed = TimedAhead(growing_ahead(drafter, plan, Counted), clock)
    measured = RoundStats(plan) if adapting else None
    found = []
    for half in texts:
        rate = speed(half, timed, TimedVerifier(verifier, clock), measured, tokens)
        found.append((rate, f"d {measured.steps} bs {measured.nodes}" if measured is not None else ""))
    return found


def compare(
    plan: EngineConfig, times: Sequence[float], sets: Sequence[Sequence[Half]], tokens: int, fixed: bool
) -> None:
    """Prints one line per half: mean speeds over the sets without adaptation, with it and, if `fixed`, with the best
    shape of FIXED."""
    adapting = replace(plan, adapt_steps=True, adapt_batch=True)
    off = [run(plan, times, plan.self_switch, texts, tokens) for texts in sets]
    on = [run(adapting, times, True, texts, tokens) for texts in sets]
    alone = {shape: replace(plan, self_switch=False, verify_batch=shape[1], draft_steps=shape[0]) for shape in FIXED}
    shapes = {shape: [run(one, times, False, texts, tokens) for texts in sets] for shape, one in alone.items() if fixed}
    for at, half in enumerate(sets[0]):
        before, after = [found[at][0] for found in off], [found[at][0] for found in on]
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        error = f" +- {stdev(ratios) / len(ratios) ** 0.5:.3f}" if len(ratios) > 1 else ""
        line = (
            f"  {half.name:13} off {mean(before):6.1f} tok/s (d {plan.initial_draft_steps}), on {mean(after):6.1f}"
            f" ({mean(ratios):.3f}{error}, at the end {on[-1][at][1]})"
        )
        speeds = {shape: mean(one[at][0] for one in found) for shape, found in shapes.items()}
        if speeds:
            best = max(speeds, key=lambda shape: speeds[shape])
            line += f"; best fixed {speeds[best]:6.1f} (d {best[0]}, bs {best[1]})"
        print(line, flush=True)


def main() -> None:
    """Runs the comparison in each of --modes for every entry of TIMES."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=8, help="prompts per half")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--modes", default="serial,async")
    parser.add_argument("--self-switch", action="store_true", help="allow rounds without the draft in both runs")
    parser.add_argument("--sets", type=int, default=1, help="sets of prompts, run separately")
    parser.add_argument("--fixed", action=argparse.BooleanOptionalAction, default=True, help="also run fixed shapes")
    args = parser.parse_args()
    sets = halves(args.limit, args.sets)
    for mode in args.modes.split(","):
        for name, times in TIMES.items():
            d = (
                steps_for(times[1], DraftTimes(TURN, times[2]))
                if mode == "async"
                else EngineConfig().initial_draft_steps
            )
            print(f"{mode}, {name}", flush=True)
            plan = EngineConfig(mode, draft_steps=d, self_switch=args.self_switch)
            compare(plan, times, sets, args.max_tokens, args.fixed)


if __name__ == "__main__":
    main()
