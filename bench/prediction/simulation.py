"""Simulates the duration of rounds that were recorded with a real model pair.

For a fixed d the accepted tokens of a round do not depend on any duration. The recorded rounds therefore determine what
is accepted, and the simulation determines the times.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from swiftspec.errors import UserError

Rounds = Sequence[tuple[int, int]]  # (accepted draft tokens, expansions on the critical path)
NUM_RESAMPLES = 64  # bootstrap samples of the recorded rounds, each made of blocks
BLOCK_ROUNDS = 16  # rounds per block, since the acceptance of successive rounds is correlated


@dataclass(frozen=True, slots=True)
class SimulatedTimes:
    """Times that a simulation takes as given, in seconds.

    `target`, `draft`: one forward.
    The other fields are host work and messages around the forwards.
    """

    target: float
    draft: float
    verify: float = 0.0  # sampling, finding the accepted path, building the batch
    settle: float = 0.0  # the target's work after a result, while the draft makes the next proposal
    expand: float = 0.0  # per expansion: selecting leaves and children, building the mask
    answer: float = 0.0  # re-rooting and choosing the proposal
    link: float = 0.0  # one message between target and draft, in one direction


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a simulated run.

    `speed`: tokens per second.
    `round`: mean duration of a round in seconds.
    `waiting`: mean seconds per round in which the target waits for a proposal.
    """

    speed: float
    round: float
    waiting: float
    tokens_per_round: float


def asynchronous(rounds: Rounds, d: int, times: SimulatedTimes) -> Outcome:
    """Simulates asynchronous mode: the draft runs d expansions while the target verifies, and sends the next proposal
    after both have finished."""
    submitted = grown = waiting = 0.0
    for _, critical in rounds:
        grown_until = grown + d * (times.draft + times.expand)  # `grown`: here the start of the expansions
        result = submitted + times.target + times.verify
        answering = max(result + times.link, grown_until)
        answered = answering + times.answer + critical * (times.draft + times.expand)
        arrives = max(answered + times.link, result + times.settle)
        waiting += arrives - result
        submitted, grown = arrives, answered
    return outcome(rounds, submitted, waiting)


def serial(rounds: Rounds, d: int, times: SimulatedTimes) -> Outcome:
    """Simulates serial mode: in each round d expansions, then the verification."""
    drafting = times.answer + d * (times.draft + times.expand)
    length = times.target + times.verify + times.settle + drafting
    return outcome(rounds, length * len(rounds), drafting * len(rounds))


def plain(times: SimulatedTimes, count: int = 1) -> Outcome:
    """Simulates `count` rounds of autoregressive decoding."""
    return outcome([(0, 0)] * count, count * (times.target + times.verify + times.settle), 0.0)


def run(mode: str, rounds: Rounds, d: int, times: SimulatedTimes) -> Outcome:
    """Simulates mode `ar`, `serial` or `async`."""
    return {"async": asynchronous, "serial": serial}[mode](rounds, d, times) if mode != "ar" else plain(times)


def outcome(rounds: Rounds, seconds: float, waiting: float) -> Outcome:
    """Returns the outcome of `rounds` that took `seconds` in total, in which the target waited `waiting` seconds."""
    tokens = sum(accepted + 1 for accepted, _ in rounds)
    return Outcome(tokens / seconds, seconds / len(rounds), waiting / len(rounds), tokens / len(rounds))


def interval(
    mode: str, rounds: Rounds, d: int, slow: SimulatedTimes, fast: SimulatedTimes
) -> tuple[float, float, float]:
    """Returns (low, middle, high) tokens per second.

    Middle is the speed with the mean of `slow` and `fast`. The other two come from a block bootstrap of the rounds: low
    is the 5 % quantile with `slow`, high the 95 % quantile with `fast`. In mode ar every round is the same, and low and
    high are the speeds with `slow` and `fast`.
    """
    middle = run(mode, rounds, d, between(slow, fast)).speed
    if mode == "ar":
        return run(mode, rounds, d, slow).speed, middle, run(mode, rounds, d, fast).speed
    draw = random.Random(0)
    ends = [[], []]
    size = min(BLOCK_ROUNDS, len(rounds))
    for _ in range(NUM_RESAMPLES):
        starts = [draw.randrange(len(rounds) - size + 1) for _ in range(math.ceil(len(rounds) / size))]
        sample = [pair for start in starts for pair in rounds[start : start + size]]
        for end, times in zip(ends, (slow, fast)):
            end.append(run(mode, sample, d, times).speed)
    return statistics.quantiles(ends[0], n=20)[0], middle, statistics.quantiles(ends[1], n=20)[-1]


def between(slow: SimulatedTimes, fast: SimulatedTimes) -> SimulatedTimes:
    """Returns the mean of two sets of times, field by field."""
    return SimulatedTimes(
        **{f.name: (getattr(slow, f.name) + getattr(fast, f.name)) / 2 for f in fields(SimulatedTimes)}
    )


def best_improvement(mode: str, rounds: Rounds, d: int, times: SimulatedTimes) -> tuple[str, float]:
    """Returns (description, relative gain in speed) of the most effective of three changes: a target step shorter by
    10 %, a draft step shorter by 10 %, or no time outside the forwards."""
    base = run(mode, rounds, d, times).speed
    bare = replace(SimulatedTimes(times.target, times.draft))
    options = {
        "10 % shorter target step": replace(times, target=0.9 * times.target),
        "10 % shorter draft step": replace(times, draft=0.9 * times.draft),
        "no time outside the models": bare,
    }
    gains = {what: run(mode, rounds, d, changed).speed / base - 1 for what, changed in options.items()}
    return max(gains.items(), key=lambda item: item[1])


class RecordedAcceptance:
    """Recorded rounds by mode and tree shape. Created from records with the layout of field `rounds` of a profile."""

    def __init__(self, records: Sequence[Mapping[str, Any]]) -> None:
        self._rounds: dict[tuple[str, int, int, int], list[tuple[int, int]]] = {}
        for record in records:
            plan = record["plan"]
            shape = (plan["mode"], plan["verify_batch"], plan["draft_leaves"], plan["draft_steps"])
            if record["rounds"]:
                self._rounds[shape] = [(int(accepted), int(critical)) for accepted, critical in record["rounds"]]

    def depths(self, mode: str, bs: int, w: int) -> list[int]:
        """Returns every d recorded with this mode, bs and w, in ascending order. Raises UserError if there is none."""
        found = sorted(d for m, b, leaves, d in self._rounds if (m, b, leaves) == (mode, bs, w))
        if not found:
            raise UserError(
                f"no recorded rounds of mode {mode} with bs {bs} and w {w}: use another --verify-batch or"
                " --draft-leaves, or specify a profile that has them with --acceptance"
            )
        return found

    def chains(self, steps: int) -> Rounds:
        """Returns the rounds recorded with chains of `steps` draft tokens. Raises UserError if there are none."""
        known = sorted(d for mode, _, leaves, d in self._rounds if (mode, leaves) == ("serial", 1))
        if steps not in known:
            listed = ", ".join(map(str, known)) or "none"
            raise UserError(f"no chains of {steps} draft tokens were recorded; recorded lengths: {listed}")
        return self.rounds("serial", steps + 1, 1, steps)

    def rounds(self, mode: str, bs: int, w: int, d: int) -> Rounds:
        """Returns the rounds recorded with this mode and tree shape. Raises KeyError if there are none."""
        return self._rounds[mode, bs, w, d]
