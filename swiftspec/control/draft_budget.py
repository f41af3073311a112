"""Trial budget: bounds the time that a draft may cost, with sequential tests that stop as soon as it is spent.

The unit of all amounts is the duration of an autoregressive round, so that they stay valid when the machine is busier
or the engine restarts. A round without the draft earns `TRIAL_SHARE`; a round with it is charged its duration and
credited its tokens. Over any number of rounds the draft therefore costs at most `TRIAL_SHARE` of the others, the
initial amount and what it gained before, and one round more, because a round cannot be interrupted.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import ClassVar

from swiftspec.control.measurement_file import MeasurementFile
from swiftspec.params import SamplingParams

TRIAL_SHARE = 0.01  # earned by each round without the draft
INITIAL_SAVINGS = 5.0  # of a draft that should pay at a typical acceptance rate: 2 % of an answer of 256 tokens
MAX_ALLOWANCE = 5.0  # largest loss after which speculation stops, however much it has gained before
MAX_SAVINGS = 16.0  # largest saved gain, which later requests may lose
RECENT_ROUNDS = 16  # that can prolong the use of a draft whose budget is spent
NARROW_GAIN = 0.2  # mean gain of these rounds that an error of measured times could explain
TRIAL_ROUNDS = 2  # rounds without an accepted token that a trial must be able to afford
MAX_FAILURES = 4  # doublings of what a trial requires
# Duration of the draft's prefill of a token, until it is measured
TYPICAL_TOKEN_COST = 1 / 64
MIN_MEASURED_TOKENS = 16  # a shorter prefill does not measure the duration of a token
STOPPED = -1.0  # allowance of a draft that is not to be used at first
GREEDY, SAMPLED, GUIDED = "greedy", "sampled", "guided"  # kinds of requests


@dataclass(slots=True)
class DraftBudget:
    """Budget of the rounds with a draft, over all requests of one kind."""

    savings: float = INITIAL_SAVINGS  # gains less losses of all rounds so far
    allowance: float = MAX_ALLOWANCE  # what the current rounds with the draft may lose; negative: it is spent
    failures: int = 0  # successive trials that spent their allowance
    token_cost: float = TYPICAL_TOKEN_COST  # of the draft's prefill of a token
    backlog: int = 0  # tokens that the draft has to prefill before its next round
    # gains of the latest rounds with the draft since it was last started
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_ROUNDS))

    @property
    def spent(self) -> bool:
        """Whether the draft has lost what it may lose."""
        return self.allowance < 0

    @property
    def pays(self) -> bool:
        """Whether the draft may continue: its budget is not spent, or the latest rounds have gained time in total."""
        return not self.spent or sum(self.recent) > 0

    @property
    def gains_little(self) -> bool:
        """Whether the latest rounds with the draft have a gain below `NARROW_GAIN` on average."""
        return len(self.recent) == RECENT_ROUNDS and sum(self.recent) < NARROW_GAIN * RECENT_ROUNDS

    def earn(self, rounds: int) -> None:
        """Counts rounds without the draft."""
        self.savings += TRIAL_SHARE * rounds

    def settle(self, gain: float) -> None:
        """Counts a round with the draft. `gain`: its tokens, beyond those of a round without the draft, less its
        additional duration; negative for a loss."""
        spent = self.spent
        self.recent.append(gain)
        self.savings = min(self.savings + gain, max(self.savings, MAX_SAVINGS))
        self.allowance = min(self.allowance + gain, max(self.allowance, MAX_ALLOWANCE))
        if self.spent and not spent:
            self.failures = min(self.failures + 1, MAX_FAILURES)
        elif self.allowance >= MAX_ALLOWANCE:
            self.failures = 0

    def charge_prefill(self, tokens: int, rounds: float, *, at_open: bool) -> None:
        """Counts a prefill of the draft that took as long as `rounds` rounds. `at_open`: whether it belonged to the
        beginning of a request, where it does not count for the current trial."""
        if tokens >= MIN_MEASURED_TOKENS:
            self.token_cost = rounds / tokens
        self.savings -= rounds
        if not at_open:
            self.allowance -= rounds
        self.backlog = 0

    def may_start(self, missed_round: float, rounds: int | None) -> bool:
        """Returns whether a trial may begin: whether the prefill of the backlog and a few rounds in which nothing is
        accepted can be afforded, twice as many after each failed trial.

        `missed_round`: loss of such a round. `rounds`: those without the draft since the last trial, which must have
        earned the trial; None: at the beginning of a request, where earlier gains suffice.
        """
        required = self._prefill_price + TRIAL_ROUNDS * missed_round * 2**self.failures
        return self.savings >= required and (rounds is None or TRIAL_SHARE * rounds >= required)

    def start(self, missed_round: float) -> None:
        """Begins a trial. `missed_round`: see `may_start`."""
        self.allowance = min(self._prefill_price + TRIAL_ROUNDS * missed_round, self.savings)
        self.recent.clear()

    def start_request(self) -> bool:
        """Begins a request with the draft: renews the allowance from the savings. Returns False, and ends its use, if
        the prefills of the draft have cost more than it gains."""
        self.recent.clear()
        if self.savings < -MAX_SAVINGS:
            self.allowance = STOPPED
        else:
            self.allowance = max(self.allowance, min(self.savings, MAX_ALLOWANCE))
        return not self.spent

    @property
    def _prefill_price(self) -> float:
        return self.backlog * self.token_cost

    def to_json(self) -> dict[str, float]:
        return {
            "savings": math.floor(10 * self.savings) / 10,
            "allowance": math.floor(10 * self.allowance) / 10,
            "failures": self.failures,
            "token_cost": round(self.token_cost, 5),
        }

    @staticmethod
    def from_json(data: object) -> DraftBudget:
        """Raises ValueError if `data` was not made by `to_json`."""
        if not isinstance(data, dict) or {*data} != {"savings", "allowance", "failures", "token_cost"}:
            raise ValueError("not a draft budget")
        if not all(type(value) in (int, float) and math.isfinite(value) for value in data.values()):
            raise ValueError("not a draft budget")
        failures, token_cost = data["failures"], data["token_cost"]
        if failures not in range(MAX_FAILURES + 1) or token_cost < 0:
            raise ValueError("not a draft budget")
        return DraftBudget(data["savings"], data["allowance"], failures, token_cost)


@dataclass(frozen=True, slots=True)
class DraftBudgets:
    """The budgets of one drafter, by kind of request: greedy, sampled, and with guidance."""

    FILE_STEM: ClassVar[str] = "trial-budgets"

    by_kind: dict[str, DraftBudget]

    def to_json(self) -> dict[str, object]:
        return {kind: budget.to_json() for kind, budget in self.by_kind.items()}

    @staticmethod
    def from_json(data: object) -> DraftBudgets:
        """Raises ValueError if `data` was not made by `to_json`."""
        if not isinstance(data, dict):
            raise ValueError("not draft budgets")
        kinds = (kind for kind in (GREEDY, SAMPLED, GUIDED) if kind in data)
        return DraftBudgets({kind: DraftBudget.from_json(data[kind]) for kind in kinds})


@dataclass(frozen=True, slots=True)
class StoredBudgets:
    """The budgets of an earlier start, and the file of those of this one. `file`: None: nothing is stored."""

    file: MeasurementFile[DraftBudgets] | None
    known: DraftBudgets

    @staticmethod
    def read(file: MeasurementFile[DraftBudgets] | None) -> StoredBudgets:
        """Reads the budgets of an earlier start, if there are any."""
        known = None if file is None else file.read()
        return StoredBudgets(file, known or DraftBudgets({}))

    def of(self, kind: str) -> DraftBudget | None:
        """Returns the stored budget of requests of a kind; None if there is none."""
        found = self.known.by_kind.get(kind)
        return None if found is None else replace(found)

    def keep(self, kind: str, budget: DraftBudget) -> None:
        """Stores the budget of requests of a kind, unless what is to be stored is stored already."""
        before = self.known.by_kind.get(kind)
        if before is None or before.to_json() != budget.to_json():
            self.known.by_kind[kind] = replace(budget)
            if self.file is not None:
                self.file.write(self.known)


def kind_of(sampling: SamplingParams) -> str:
    """Returns the kind of a request: the draft pays in some of them and not in others."""
    if sampling.guided:
        return GUIDED
    return GREEDY if sampling.greedy else SAMPLED
