"""How long one step takes here: what d, the expansions of a round, is set by (paper section 3.1)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

from swiftspec.batch import Proposal
from swiftspec.params import SamplingParams
from swiftspec.worker.drafter import Drafter
from swiftspec.worker.verifier import Verifier

TEXT = [0] * 64  # what is decoded to measure: any tokens do
GREEDY = SamplingParams(temperature=0)
REPEATS = 8
MOST_STEPS = 16  # d beyond this adds nodes that are hardly ever accepted


class SteppedDrafter(Drafter, Protocol):
    """A drafter that says how often it expands in a round."""

    @property
    def steps(self) -> int: ...


def expansion_time(drafter: SteppedDrafter) -> float:
    """Seconds of one expansion of w leaves, the host's part included. Leaves no request open."""

    def reopen() -> None:
        drafter.open(0, TEXT, GREEDY, len(TEXT))

    seconds = _shortest(drafter.grow, reopen) / drafter.steps
    drafter.close()
    return seconds


def verification_time(verifier: Verifier, bs: int) -> float:
    """Seconds of one verification of bs nodes, the host's part included. Leaves no request open."""
    chain = Proposal(0, 0, len(TEXT) - 1, (TEXT[0],) * bs, tuple(range(-1, bs - 1)))

    def reopen() -> None:
        verifier.open(0, TEXT, GREEDY, len(TEXT))

    seconds = _shortest(lambda: verifier.submit(chain).wait(), reopen)
    verifier.close()
    return seconds


def steps_for(target: float, draft: float) -> int:
    """d for these times of a verification and an expansion: as many as fit, so that the target never waits."""
    return min(max(math.floor(target / draft), 1), MOST_STEPS)


def _shortest(act: Callable[[], object], prepare: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        prepare()
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return min(times)  # whatever else the machine did only added to the others
