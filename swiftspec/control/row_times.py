"""Row times: seconds of a forward of each model by its number of rows, measured at the start of the engine.

They predict the time of a round of any shape (d, bs) before a round has been measured. They are kept in a file, so that
later starts with the same models on the same machine do not measure again, unless another process slowed the
measurement down.

The measured rows are proposals of the draft, because the price of a row of a mixture of experts is that of the experts
that no other row uses: equal tokens would be routed to the same experts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from swiftspec.control.step_times import GREEDY
from swiftspec.messages import Proposal, RequestStart
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.verifier import LocalVerifier

# Numbers of rows of the measured verifications, in this order: a slow model may not reach the last ones.
VERIFIED_ROWS = (1, 8, 32, 16, 4)
# Further ones on a GPU, whose graphs pad them to 32 and 16 rows: between measured numbers times are interpolated
PADDED_ROWS = (24, 12)
TARGET_BUDGET_S, DRAFT_BUDGET_S = 1.3, 0.4  # of the measurement of each model, without its warm-up
MEASURED_TOKEN_STRIDE = 7919  # between the tokens of a measured chain, a prime, so that they differ
REPEATS = 3  # forwards with each number of rows, while the budget lasts
# More of them for fast models, whose forwards take less time than another process may run before them.
MAX_REPEATS, REPEAT_BUDGET_S = 12, 0.1
# Another process has slowed a measurement down whose time of one row exceeds the present one by this factor.
SLOWED_RATIO = 1.15
CHECKED_FORWARDS, CHECK_BUDGET_S = 8, 0.05  # of the check, which runs two forwards or more
MAX_CHECKED_S = 0.25  # longest checked time of one row: the check of slower models would delay every start
ROOT = RequestStart(0, (0,), GREEDY, 1)  # a request without a prefill: the prompt is its root


@dataclass(frozen=True, slots=True)
class RowTimes:
    """Seconds of a forward of one model at some numbers of rows, ascending."""

    FILE_STEM: ClassVar[str] = "row-times"

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    @staticmethod
    def of(measured: Mapping[int, float]) -> RowTimes:
        """Returns the times of the shortest measured forwards. Other load can only prolong a forward, and fewer rows
        never take longer, so a time is limited by the times of more rows."""
        rows = tuple(sorted(measured))
        descending = np.array([measured[count] for count in reversed(rows)])
        return RowTimes(rows, tuple(np.minimum.accumulate(descending)[::-1].tolist()))

    def at(self, rows: float) -> float:
        """Returns the seconds of a forward of `rows` rows: interpolated linearly, and above the measured numbers
        continued with the slope of the last two."""
        most, last = self.rows[-1], self.seconds[-1]
        if rows <= most or len(self.rows) == 1:
            return float(np.interp(rows, self.rows, self.seconds))
        slope = (last - self.seconds[-2]) / (most - self.rows[-2])
        return last + slope * (rows - most)

    def slowed_down(self, one_row_now: Callable[[], float]) -> bool:
        """Returns whether another process slowed the measurement down; not checked for slow models. `one_row_now`:
        returns the seconds of a forward of one row now."""
        return self.at(1) <= MAX_CHECKED_S and self.at(1) > SLOWED_RATIO * one_row_now()

    def shared_by(self, requests: int) -> RowTimes:
        """Returns the times by the rows of one of several requests, each of which has that many in the forward."""
        return RowTimes(self.rows, tuple(self.at(requests * rows) for rows in self.rows))

    def to_json(self) -> dict[str, float]:
        return {str(rows): seconds for rows, seconds in zip(self.rows, self.seconds, strict=True)}

    @staticmethod
    def from_json(data: object) -> RowTimes:
        """Raises ValueError if `data` was not made by `to_json`."""
        if not isinstance(data, dict) or not data:
            raise ValueError("not a table of row times")
        measured = {int(rows): seconds for rows, seconds in data.items()}
        for rows, seconds in measured.items():
            if rows < 1 or type(seconds) is not float or not 0 < seconds < math.inf:
                raise ValueError("not a row time")
        return RowTimes.of(measured)


@dataclass(frozen=True, slots=True)
class PairTimes:
    """Row times of a model pair: of the target's verifications by bs, and of the draft's expansions by w."""

    FILE_STEM: ClassVar[str] = "row-times"

    target: RowTimes
    draft: RowTimes

    def slowed_down(self, one_row_now: Callable[[], float]) -> bool:
        """See `RowTimes.slowed_down`."""
        return self.target.slowed_down(one_row_now)

    def shared_by(self, requests: int) -> PairTimes:
        """See `RowTimes.shared_by`."""
        return PairTimes(self.target.shared_by(requests), self.draft.shared_by(requests))

    def to_json(self) -> dict[str, object]:
        return {"target": self.target.to_json(), "draft": self.draft.to_json()}

    @staticmethod
    def from_json(data: object) -> PairTimes:
        """Raises ValueError if `data` was not made by `to_json`."""
        if not isinstance(data, dict):
            raise ValueError("not the row times of a pair")
        return PairTimes(RowTimes.from_json(data.get("target")), RowTimes.from_json(data.get("draft")))


def measure_pair_times(
    verifier: LocalVerifier,
    drafter: LocalDrafter,
    leaves: int,
    max_rows: int,
    clock: Callable[[], float] = time.perf_counter,
) -> PairTimes | None:
    """Measures the row times of a pair, or returns None if the budget does not suffice. No request is open afterwards.

    `leaves`: w. `max_rows`: the largest bs. `clock`: returns the time in seconds.
    """

    def verify(rows: int) -> float:
        verifier.open(ROOT)
        began = clock()
        verifier.verify(proposals[rows])
        return clock() - began

    def expand(rows: int) -> float:
        drafter.open(ROOT)
        if rows > 1:  # the first expansion is that of the root
            drafter.expand()
        began = clock()
        drafter.expand()
        return clock() - began

    counts = verified_rows(verifier, max_rows)
    proposals = draft_proposals(drafter, counts)
    target = measure_row_times(verify, counts, TARGET_BUDGET_S, clock)
    verifier.close()
    draft = measure_row_times(expand, (1, max(leaves, 2)), DRAFT_BUDGET_S, clock)
    drafter.close()
    return None if target is None or draft is None else PairTimes(target, draft)


def measure_target_times(
    verifier: LocalVerifier, max_rows: int, vocab: int, clock: Callable[[], float] = time.perf_counter
) -> RowTimes | None:
    """Measures the times of the target's verifications by their number of rows, without a draft: of different tokens
    below `vocab`. Returns None if the budget does not suffice. No request is open afterwards. `max_rows`: the largest
    bs. `clock`: returns the time in seconds."""

    def verify(rows: int) -> float:
        tokens = [(i * MEASURED_TOKEN_STRIDE) % vocab for i in range(rows)]
        verifier.open(ROOT)
        proposal = Proposal.from_draft_model(0, 0, 0, tokens, range(-1, rows - 1), (0.0,) * rows)
        began = clock()
        verifier.verify(proposal)
        return clock() - began

    times = measure_row_times(verify, verified_rows(verifier, max_rows), TARGET_BUDGET_S, clock)
    verifier.close()
    return times


def one_row_seconds(verifier: LocalVerifier, clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the seconds of the shortest of a few verifications of one row. No request is open afterwards."""
    proposal, found, began = Proposal.from_draft_model(0, 0, 0, (0,), (-1,), (0.0,)), list[float](), clock()
    while len(found) < 2 or (len(found) < CHECKED_FORWARDS and clock() - began < CHECK_BUDGET_S):
        verifier.open(ROOT)
        started = clock()
        verifier.verify(proposal)
        found.append(clock() - started)
    verifier.close()
    return min(found)


def verified_rows(verifier: LocalVerifier, max_rows: int) -> list[int]:
    """Returns the numbers of rows, up to `max_rows`, with which the verifications of `verifier` are timed, in order."""
    padded = PADDED_ROWS if verifier.runner.model.device.type == "cuda" else ()
    return [*dict.fromkeys(min(rows, max_rows) for rows in (*VERIFIED_ROWS, *padded))]


def draft_proposals(drafter: LocalDrafter, counts: Collection[int]) -> dict[int, Proposal]:
    """Returns a proposal of the draft for each of `counts` nodes, or of all nodes if its tree cannot grow further."""
    drafter.open(ROOT)
    nodes = 0
    while nodes < drafter.tree.count and nodes < max(counts):
        nodes = drafter.tree.count
        drafter.expand()
    found = dict[int, Proposal]()
    for count in counts:
        _, tokens, parents, weights = drafter.tree.best_subtree(count)
        found[count] = Proposal.from_draft_model(0, 0, 0, tokens, parents, weights)
    drafter.close()
    return found


def measure_row_times(
    forward: Callable[[int], float], counts: Sequence[int], budget_s: float, clock: Callable[[], float]
) -> RowTimes | None:
    """Measures the shortest time of a forward of each of `counts` rows, after a warm-up, which reads mapped weights. A
    forward that would probably exceed `budget_s` seconds in total, without the warm-up, ends the measurement, except
    the one with the second number of rows. Returns None if the first one takes half of the budget.

    `forward`: runs a forward of the given number of rows and returns its seconds.
    """
    forward(counts[0])
    began, times = clock(), dict[int, float]()
    for repeat in range(MAX_REPEATS):
        if repeat >= REPEATS and clock() - began > REPEAT_BUDGET_S:
            break
        for rows in counts:
            expected = RowTimes.of(times).at(rows) if times else 0.0
            if len(times) == 1 and expected > budget_s / 2:
                return None
            if len(times) > 1 and clock() - began + expected > budget_s:
                return RowTimes.of(times)
            times[rows] = min(forward(rows), times.get(rows, math.inf))
    return RowTimes.of(times)
