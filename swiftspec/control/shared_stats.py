"""Measurements of rounds that the controllers of an engine share."""

from __future__ import annotations

from collections.abc import Callable

from swiftspec.config import EngineConfig
from swiftspec.control.draft_budget import StoredBudgets
from swiftspec.control.policy import initial_stats
from swiftspec.control.round_stats import RoundStats
from swiftspec.control.row_times import PairTimes


class SharedStats:
    """One `RoundStats` for each kind of request and each number of requests that share the rounds.

    Concurrent requests expand and verify their trees in the same forwards, so the best d and bs, and whether the draft
    pays, depend on how many they are. The controllers of all of them measure and decide together.
    """

    def __init__(
        self,
        config: EngineConfig,
        row_times: PairTimes | None = None,
        budgets: StoredBudgets | None = None,
        num_requests: Callable[[], int] = lambda: 1,
    ) -> None:
        """`row_times`: times of the models' forwards by number of rows; None: not measured.
        `budgets`: what the draft has gained in earlier starts; None: nothing is known or stored.
        `num_requests`: returns the number of requests that share the rounds."""
        self._config, self.row_times, self._num_requests = config, row_times, num_requests
        self._budgets = budgets or StoredBudgets.read(None)
        self._made = dict[tuple[str, int], RoundStats]()

    def of(self, kind: str) -> RoundStats:
        """Returns the measurements of a kind of request (`draft_budget.kind_of`) in the present company."""
        count = self._num_requests()
        found = self._made.get((kind, count))
        if found is None:
            times = None if self.row_times is None else self.row_times.shared_by(count)
            budget = self._budgets.of(kind) if count == 1 else None
            found = self._made[kind, count] = initial_stats(self._config, times, budget)
        return found

    def keep(self, kind: str) -> None:
        """Stores the budget of a kind of request, as it is without company."""
        alone = self._made.get((kind, 1))
        if alone is not None and self._config.self_switch:
            self._budgets.keep(kind, alone.budget)
