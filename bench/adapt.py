"""Adaptation on against off in mode serial, over prompts whose text is predictable at first and hardly so afterwards.

    python -m bench.adapt [--limit 8] [--max-tokens 128] [--self-switch]

The embedded pair's real rounds on a clock of their own, which goes on by a given time for each verification and each
expansion: the result is the same on any machine, busy or not. The predictable half goes on with a table (greedy), the
other is held-out code at temperature 1.5. Off keeps d = 3, bs = 8. Besides, the best of all fixed shapes for each half.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoTokenizer

from bench.heldout import DEMO, read_prompts
from swiftspec.batch import Proposal, VerifyResult
from swiftspec.decode import decode
from swiftspec.engine import LLM
from swiftspec.params import Plan, SamplingParams
from swiftspec.worker.drafter import Drafter
from swiftspec.worker.local_drafter import LocalDrafter
from swiftspec.worker.policy import Pace
from swiftspec.worker.steered import Steered
from swiftspec.worker.verifier import Verifier

TIMES = {  # milliseconds: target over 1 and over 8 rows, an expansion
    "a dear draft (the paper's Table 6)": (10.34, 10.34, 3.73),
    "a cheap draft": (10.0, 10.0, 0.8),
    "rows that cost": (4.0, 10.0, 1.0),
}
FIXED = [(d, bs) for bs in (8, 4, 2) for d in (1, 2, 3, 4, 6, 8)]
ROW = "    [" + ", ".join(["{0}"] * 8) + "],\n"


@dataclass(slots=True)
class Clock:
    """Milliseconds that pass only where a model would have taken them."""

    one: float  # the target over one row
    eight: float
    expansion: float
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class TimedDrafter:
    """A drafter whose proposals take d expansions of the clock."""

    def __init__(self, drafter: LocalDrafter, clock: Clock) -> None:
        self._drafter, self._clock = drafter, clock
        self.busy = 0.0
        self.open, self.grow, self.observe, self.close = drafter.open, drafter.grow, drafter.observe, drafter.close

    @property
    def steps(self) -> int:
        """d."""
        return self._drafter.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._drafter.steps = steps

    def propose(self) -> Proposal:
        spent = self.steps * self._clock.expansion
        self.busy += spent
        self._clock.now += spent
        return self._drafter.propose()


class TimedVerifier:
    """A verifier whose forwards take the clock's time for their rows."""

    def __init__(self, verifier: Verifier, clock: Clock) -> None:
        self._verifier, self._clock = verifier, clock
        self.open, self.settle, self.close = verifier.open, verifier.settle, verifier.close

    @property
    def busy(self) -> float:
        return self._verifier.busy

    def submit(self, proposal: Proposal) -> TimedVerifier:
        self._proposal = proposal
        return self

    def wait(self) -> VerifyResult:
        one, eight = self._clock.one, self._clock.eight
        self._clock.now += one + (eight - one) * (len(self._proposal.tokens) - 1) / 7
        return self._verifier.submit(self._proposal).wait()


@dataclass(frozen=True, slots=True)
class Half:
    """Prompts and how they are sampled."""

    name: str
    prompts: list[list[int]]
    sampling: SamplingParams


def halves(limit: int) -> list[Half]:
    """The predictable one, then the other."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    tables = [tokenizer("table = [\n" + ROW.format(n) * 10)["input_ids"] for n in range(limit)]
    return [
        Half("predictable", tables, SamplingParams(temperature=0)),
        Half("unpredictable", read_prompts(tokenizer)[:limit], SamplingParams(temperature=1.5)),
    ]


def speed(llm: LLM, half: Half, pace: Pace | None, clock: Clock, tokens: int) -> float:
    """Tokens a second of the clock. Without a pace the engine's own shape."""
    assert isinstance(llm.drafter, LocalDrafter)
    timed = TimedDrafter(llm.drafter, clock)
    verifier = TimedVerifier(llm.verifier, clock)
    began, count = clock.now, 0
    for number, prompt in enumerate(half.prompts):
        drafter: Drafter = timed if pace is None else Steered(timed, pace, clock)
        drafter.open(number, prompt, half.sampling, len(prompt))
        verifier.open(number, prompt, half.sampling, len(prompt))
        there = count
        for round_ in decode(drafter, verifier):
            count += len(round_.tokens)
            if count - there >= tokens:
                break
        drafter.close()
        verifier.close()
    return 1e3 * count / (clock.now - began)


def main() -> None:
    """Every kind of step times: off, on, and the best fixed shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=8, help="prompts a half")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--self-switch", action="store_true", help="both may decode plainly for a while")
    args = parser.parse_args()
    torch.set_num_threads(1)
    texts = halves(args.limit)

    def engine(plan: Plan) -> LLM:
        return LLM(DEMO / "target", DEMO / "draft", plan, dtype=torch.bfloat16)

    def run(plan: Plan, times: Sequence[float], steered: bool) -> tuple[list[float], list[str]]:
        llm, clock = engine(plan), Clock(*times)
        pace = Pace.of(plan) if steered else None
        found, ends = [], []
        for half in texts:
            found.append(speed(llm, half, pace, clock, args.max_tokens))
            ends.append(f"d {pace.steps} bs {pace.nodes}" if pace is not None else "")
        return found, ends

    for name, times in TIMES.items():
        off, _ = run(Plan(self_switch=args.self_switch), times, args.self_switch)
        free = Plan(self_switch=args.self_switch, adapt_steps=True, adapt_batch=True)
        on, ends = run(free, times, True)
        fixed = {shape: run(Plan(verify_batch=shape[1], draft_steps=shape[0]), times, False)[0] for shape in FIXED}
        print(name)
        for at, half in enumerate(texts):
            best = max(FIXED, key=lambda shape: fixed[shape][at])
            print(
                f"  {half.name:13} off {off[at]:6.1f} tok/s, on {on[at]:6.1f} ({on[at] / off[at]:.3f}, at the end"
                f" {ends[at]}); best fixed {fixed[best][at]:6.1f} (d {best[0]}, bs {best[1]})",
                flush=True,
            )


if __name__ == "__main__":
    main()
