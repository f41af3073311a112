"""Measurements of recent rounds, the only input of the policy."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from swiftspec.config import EngineConfig
from swiftspec.control.draft_budget import DraftBudget
from swiftspec.control.row_times import PairTimes

WINDOW_ROUNDS = 16  # speculative rounds that a decision is based on
PROBE_ROUNDS = 4  # autoregressive rounds of a probe
AR_WINDOW_ROUNDS = 32  # autoregressive rounds whose median duration others are compared to
MIN_MISSED_ROUND = 0.25  # least loss of a round without an accepted token that a trial is expected to have
RAISE_COOLDOWN_ROUNDS = 120  # rounds in which d and bs are not increased, after an increase was soon reverted


class Decision(NamedTuple):
    """Kind of the next rounds: speculative, or autoregressive, where d is 0 and bs is 1: only the root is verified."""

    steps: int  # d, expansions per round
    nodes: int  # bs, nodes that the target verifies per round
    speculate: bool  # whether the draft is used


NO_SPECULATION = Decision(0, 1, False)


class RoundSample(NamedTuple):
    """Measurement of one round. For an autoregressive round, `draft` is 0, `tokens` is 1 and `hits` is empty."""

    seconds: float  # duration of the round, without the time in which the caller consumes its tokens
    target: float  # seconds from the proposal to its result
    draft: float  # seconds in the draft's forwards
    tokens: int  # output tokens, the bonus token included
    # ranks by weight, among all nodes of the proposal before it is cut to bs, of those that match the output tokens
    accepted_ranks: tuple[int, ...]


@dataclass(slots=True)
class RoundStats:
    """Current kind of rounds and recent measurements. They persist across requests.

    Rounds are autoregressive while the budget is spent, and in a probe: a few rounds that measure their duration.
    """

    config: EngineConfig  # determines which of d, bs and the use of the draft are adaptive
    row_times: PairTimes | None = None  # of the models, if they were measured at start
    steps: int = field(init=False)  # current d of speculative rounds
    nodes: int = field(init=False)  # current bs of speculative rounds
    batch_sizes: list[int] = field(init=False)  # candidates for bs, ascending
    speculating: bool = True  # whether rounds are speculative at present
    rounds: int = 0  # rounds measured since steps, nodes or speculating changed
    speculative_rounds: deque[RoundSample] = field(
        default_factory=lambda: deque(maxlen=WINDOW_ROUNDS)
    )  # recent speculative rounds
    ar_seconds: deque[float] = field(
        default_factory=lambda: deque(maxlen=AR_WINDOW_ROUNDS)
    )  # seconds of recent autoregressive rounds
    ar_age: int = 0  # rounds measured since the last autoregressive round
    verify_times: dict[int, float] = field(default_factory=dict)  # latest measured seconds of a verification, by bs
    budget: DraftBudget = field(default_factory=DraftBudget)  # of the rounds with the draft
    raised: bool = False  # whether the last change of the shape increased d or bs
    raise_cooldown: int = 0  # rounds until d and bs may be increased again; not positive: they may

    def __post_init__(self) -> None:
        most = self.nodes = self.config.verify_batch
        self.steps, self.batch_sizes = self.config.initial_draft_steps, [most]
        if self.config.adapt_batch:  # bs, its half, its quarter and so on, down to 2 or 3
            self.batch_sizes = sorted(most >> i for i in range(max(most.bit_length() - 1, 1)))

    @property
    def current(self) -> Decision:
        """The current kind of rounds."""
        return Decision(self.steps, self.nodes, True) if self.speculating else NO_SPECULATION

    @property
    def speculative_round_time(self) -> float | None:
        """Median duration of the recent speculative rounds in seconds; None if none were measured."""
        return median(tree.seconds for tree in self.speculative_rounds) if self.speculative_rounds else None

    @property
    def ar_round_time(self) -> float | None:
        """Median duration of the recent autoregressive rounds in seconds; None if none were measured."""
        return median(self.ar_seconds) if self.ar_seconds else None

    @property
    def reference_time(self) -> float | None:
        """Seconds of an autoregressive round, to which speculative ones are compared: measured, or else from row times,
        in proportion to recent verifications; None without either."""
        if self.ar_seconds or self.row_times is None:
            return self.ar_round_time
        times, recent = self.row_times.target, [seen.target for seen in self.speculative_rounds]
        return times.at(1) * (median(recent) / times.at(self.nodes) if recent else 1.0)

    @property
    def usual_round_time(self) -> float | None:
        """Seconds of a speculative round: measured, or else predicted from row times; None without either."""
        times, seconds = self.row_times, self.reference_time
        if self.speculative_rounds or times is None or seconds is None:
            return self.speculative_round_time
        draft = self.steps * times.draft.at(self.config.leaves_per_expansion)
        return seconds * (times.target.at(self.nodes) + draft) / times.target.at(1)

    @property
    def missed_round(self) -> float | None:
        """Loss of a round with the draft in which nothing is accepted, in autoregressive rounds; None if the duration
        of these is unknown."""
        seconds, usual = self.reference_time, self.usual_round_time
        if not seconds:
            return None
        return max(1.0 if usual is None else usual / seconds - 1, MIN_MISSED_ROUND)

    def start_request(self, tokens: int) -> None:
        """Begins a request of `tokens` tokens. Its first rounds are of the kind of the previous request's last ones,
        unless those were a probe, or the budget suffices for a trial."""
        self.budget.backlog, self.raise_cooldown = tokens, 0
        if not self.config.self_switch:
            return
        if self.speculating or not self.budget.spent:
            speculate = self.budget.start_request()
        else:
            missed = self.missed_round
            speculate = missed is not None and self.budget.may_start(missed, None)
            if speculate and missed is not None:
                self.budget.start(missed)
        if speculate != self.speculating:
            self.speculating, self.rounds = speculate, 0

    def settle(self, seconds: float, tokens: int) -> None:
        """Counts a round with the draft in the budget. `seconds`, `tokens`: its duration and its output tokens, less
        those that suffix lookup alone would have had."""
        reference = self.reference_time
        if reference:  # otherwise `add_ar_rounds` counts it later
            self.budget.settle(tokens - seconds / reference)

    def add(self, seen: RoundSample) -> None:
        """Adds the measurement of a round of the current kind."""
        if not self.speculating:
            self.add_ar_rounds(1, seen.seconds)
            return
        self.rounds += 1
        self.raise_cooldown -= 1
        self.ar_age += 1
        self.speculative_rounds.append(seen)

    def add_ar_rounds(self, rounds: int, seconds: float | None) -> None:
        """Adds rounds without the draft. `seconds`: duration of the last one if it was autoregressive; None: it was
        not, or is not to be measured, so that a probe does not count it."""
        unknown = not self.ar_seconds and self.row_times is None
        self.budget.earn(rounds)
        if not self.speculating and (seconds is not None or self.budget.spent):
            self.rounds += rounds
        if seconds is not None:
            self.ar_seconds.append(seconds)
            self.ar_age = 0
        if unknown and (reference := self.reference_time):
            self.budget.savings += sum(seen.tokens - seen.seconds / reference for seen in self.speculative_rounds)

    def apply(self, to: Decision) -> None:
        """Makes `to` the kind of the next rounds, and begins a trial if the budget was spent."""
        short = self.rounds <= 2 * WINDOW_ROUNDS  # whether the current kind was in use only briefly
        if to.speculate and not self.speculating and self.budget.spent and (missed := self.missed_round) is not None:
            self.budget.start(missed)
        if to.speculate and (to.steps, to.nodes) != (self.steps, self.nodes):
            if self.speculative_rounds:
                self.verify_times[self.nodes] = median(tree.target for tree in self.speculative_rounds)
            if short and self.raised and (to.steps < self.steps or to.nodes < self.nodes):
                self.raise_cooldown = RAISE_COOLDOWN_ROUNDS
            self.raised = to.steps > self.steps or to.nodes > self.nodes
            self.steps, self.nodes = to.steps, to.nodes
        self.speculating, self.rounds = to.speculate, 0
