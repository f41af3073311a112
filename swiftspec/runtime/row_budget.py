"""The row budget of a joint verification: which nodes of several proposals are verified in one forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from swiftspec.runtime.coroutines import ROW_BUDGET, CallQueue

# Time of each further row of a verification relative to that of one row, where it is not measured.
ROW_COST = 0.1
# Further rows are verified only if the predicted tokens per second rise by this factor. In a joint verification, where
# one request cannot change the sum so much, the tokens of further rows are divided by it.
MIN_GAIN_FACTOR = 1.04


def default_row_seconds(rows: int) -> float:
    """Returns the time of a verification of `rows` rows, in units of that of one row."""
    return 1 + ROW_COST * (rows - 1)


class RowBudget:
    """Chooses the rows of a joint verification: the likeliest nodes of all proposals, as many as give the most
    predicted tokens per second of all requests together. Every request has its root, and further rows as far as its
    nodes are among the likeliest."""

    def __init__(self, calls: CallQueue, row_seconds: Callable[[int], float] = default_row_seconds) -> None:
        """`calls`: of the requests. `row_seconds`: returns the time of a verification of a number of rows; it may be
        set before the first choice."""
        self._calls, self.row_seconds = calls, row_seconds
        self._seconds = list[float]()  # of 1, 2, ... rows

    @property
    def joint(self) -> bool:
        """Whether several requests run, so that the choice is a common one."""
        return self._calls.company

    def share(self, weights: Sequence[float], least: int = 0) -> int:
        """Returns how many leading nodes of a proposal are verified. All requests that propose in this round are
        suspended until their numbers are chosen together.

        `weights`: log-weights of its nodes besides the root, descending. `least`: what the request adds to the least
        number of nodes of all requests together, whichever they belong to.
        """
        return self._calls.wait(_Share(self, weights, least)) if weights else 0

    def choose(self, weights: Sequence[Sequence[float]], least: int) -> list[int]:
        """Returns the number of leading nodes of each proposal. Parameters as in `share`, of all proposals."""
        roots = max(self._calls.num_requests, len(weights))
        owner = np.repeat(np.arange(len(weights)), [len(each) for each in weights])
        joined = np.concatenate([np.asarray(each) for each in weights])
        order = np.argsort(-joined, kind="stable")
        rows = slice(roots - 1, roots + len(order))
        tokens = roots + np.concatenate([[0.0], np.cumsum(np.exp(joined[order]))]) / MIN_GAIN_FACTOR
        speeds = tokens / np.asarray(self._times(rows.stop)[rows])
        least = min(least, len(order))
        best = least + int(np.argmax(speeds[least:]))
        return np.bincount(owner[order[:best]], minlength=len(weights)).tolist()

    def _times(self, rows: int) -> list[float]:
        """Returns the times of verifications of 1 to at least `rows` rows."""
        self._seconds += [self.row_seconds(count) for count in range(len(self._seconds) + 1, rows + 1)]
        return self._seconds


@dataclass(eq=False, slots=True)
class _Share:
    """The part of one request in the choice of rows."""

    budget: RowBudget
    weights: Sequence[float]
    least: int
    result: Any = None
    error: Exception | None = None
    priority: int = ROW_BUDGET

    @property
    def key(self) -> object:
        return self.budget

    def run(self, others: Sequence[_Share]) -> None:
        shares = [self, *others]
        counts = self.budget.choose([each.weights for each in shares], sum(each.least for each in shares))
        for each, count in zip(shares, counts, strict=True):
            each.result = count
