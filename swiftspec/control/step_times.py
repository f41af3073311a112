"""Measurement of the step times of draft and target, and the choice of d that follows from them (paper section 3.1)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from swiftspec.config import MAX_MEASURED_DRAFT_STEPS
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.runtime.drafter import Drafter
from swiftspec.runtime.verifier import Verifier

CONTEXT_TOKENS = 256  # context length during a measurement; attention over it is part of the step times
GREEDY = SamplingParams(temperature=0)
REPEATS = 8  # requests that are opened per measurement
# Verifications timed after each prefill: several, because a prefill leaves the CPU caches in another state than rounds.
VERIFICATIONS_PER_PREFILL = 4


@dataclass(frozen=True, slots=True)
class DraftTimes:
    """Typical times of a drafter in seconds. A round of the drafter takes overhead + d * expansion."""

    overhead: float  # for processing a result, re-rooting and proposing
    expansion: float  # for one expansion of w leaves, including host time


class SteppedDrafter(Drafter, Protocol):
    """A drafter whose d can be set between rounds. `draft_steps`: d; 0 if the drafter does not expand a tree."""

    @property
    def draft_steps(self) -> int: ...

    @draft_steps.setter
    def draft_steps(self, steps: int, /) -> None: ...


def measure_draft_times(drafter: SteppedDrafter, max_model_len: int) -> DraftTimes:
    """Measures the times of a drafter with d > 0, in a context of at most `max_model_len` tokens. No request is
    open afterwards."""
    text = (0,) * min(CONTEXT_TOKENS, max_model_len)
    grows, rounds = [], []
    for _ in range(REPEATS):
        drafter.open(RequestStart(0, text, GREEDY, len(text)))
        proposal = drafter.propose()
        grows.append(_seconds(drafter.grow))
        likely = proposal.tokens[1] if len(proposal.tokens) > 1 else 0
        result = VerifyResult(0, 0, proposal.prefix_len, (0,), (likely,))
        rounds.append(_seconds(lambda result=result: (drafter.observe(result), drafter.propose(), drafter.grow())))
    drafter.close()
    grown, whole = median(grows), median(rounds)
    return DraftTimes(max(whole - grown, 0.0), grown / drafter.draft_steps)


def measure_verification_time(verifier: Verifier, bs: int, max_model_len: int) -> float:
    """Measures the shortest time of a verification of `bs` nodes, in seconds and including host time, in a context of
    at most `max_model_len` tokens. No request is open afterwards."""
    text = (0,) * max(min(CONTEXT_TOKENS, max_model_len - bs * VERIFICATIONS_PER_PREFILL), 1)
    times = []
    for _ in range(REPEATS):
        verifier.open(RequestStart(0, text, GREEDY, len(text)))
        at, root = len(text) - 1, 0
        for round_ in range(VERIFICATIONS_PER_PREFILL if max_model_len > bs * VERIFICATIONS_PER_PREFILL else 1):
            chain = Proposal.from_draft_model(0, round_, at, (root,) * bs, range(-1, bs - 1), (0.0,) * bs)
            began = time.perf_counter()
            result = verifier.submit(chain).wait()
            times.append(time.perf_counter() - began)
            verifier.settle()
            at, root = at + len(result.tokens), result.tokens[-1]
    verifier.close()
    return min(times)  # the minimum, because other load can only add time


def steps_for(target: float, draft: DraftTimes) -> int:
    """Returns d for a lookahead drafter: the expansions that fit into a verification of `target` seconds.

    This is (target - overhead) / expansion, rounded down and limited to 1..MAX_MEASURED_DRAFT_STEPS, so that the target
    does not wait for the draft. The draft is rarely late if its times are typical values and `target` is a minimum.
    """
    return math.floor(min(max((target - draft.overhead) / draft.expansion, 1), MAX_MEASURED_DRAFT_STEPS))


def _seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began
