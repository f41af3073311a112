"""Measurements of recent rounds, the only input of the policy."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from swiftspec.config import EngineConfig
from swiftspec.control.row_times import PairTimes

WINDOW_ROUNDS = 16  # speculative rounds that a decision is based on
PROBE_ROUNDS = 4  # autoregressive rounds that a decision is based on
RETRY_AFTER_ROUNDS = 64  # autoregressive rounds before speculation is retried; doubled per retry until one lasts
MAX_RETRY_ROUNDS = 16 * RETRY_AFTER_ROUNDS  # upper bound of the doubled number
# A trial with few accepted tokens (`RoundStats.rarely_accepts`) can end after this number of rounds.
MIN_TRIAL_ROUNDS = 4
RARE_HITS_SHARE = 0.25  # share of the rounds in which a token is accepted, below which acceptance is rare
FAILED_RETRY_FACTOR = 4  # as doubling, after a trial with rare acceptance
MAX_FAILED_TRIALS = 2  # successive ones, after which a request does not begin with another trial
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
    """Current kind of rounds and recent measurements. They persist across requests."""

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
        default_factory=lambda: deque(maxlen=PROBE_ROUNDS)
    )  # seconds of recent autoregressive rounds
    ar_age: int = 0  # rounds measured since the last autoregressive round
    verify_times: dict[int, float] = field(default_factory=dict)  # latest measured seconds of a verification, by bs
    retry_after: int = RETRY_AFTER_ROUNDS  # autoregressive rounds before speculation is retried
    # Rounds of the current trial, which begins when speculation does: measured or not, and those that accepted a token.
    trial_rounds: int = 0
    trial_hits: int = 0
    failed_trials: int = 0  # successive trials with rare acceptance before the current or latest one
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

    def start_request(self) -> None:
        """Begins a request. Its first rounds are speculative, with the d and bs of the previous request's last
        speculative round. If the previous request ended with autoregressive rounds, the count of measured rounds
        restarts, so that the next decision waits for new speculative rounds. The back-off times of the previous request
        are reset.

        After `MAX_FAILED_TRIALS` failed trials an autoregressive phase continues instead, with its back-off time.
        """
        if not self.speculating and self.failed_trials + self.rarely_accepts >= MAX_FAILED_TRIALS:
            self.retry_after = min(self.retry_after, FAILED_RETRY_FACTOR * RETRY_AFTER_ROUNDS)
            return
        self._begin_trial()
        if not self.speculating:
            self.speculating, self.rounds = True, 0
        self.retry_after, self.raise_cooldown = RETRY_AFTER_ROUNDS, 0

    @property
    def rarely_accepts(self) -> bool:
        """Whether the current or latest trial has enough rounds to judge it, and accepted a token in few of them."""
        return self.trial_rounds >= MIN_TRIAL_ROUNDS and self.trial_hits <= RARE_HITS_SHARE * self.trial_rounds

    def count_trial(self, tokens: int) -> None:
        """Counts a speculative round with `tokens` output tokens, whether it is measured or not."""
        self.trial_rounds += 1
        self.trial_hits += tokens > 1

    def _begin_trial(self) -> None:
        if self.trial_rounds >= MIN_TRIAL_ROUNDS:
            self.failed_trials = self.failed_trials + 1 if self.rarely_accepts else 0
        self.trial_rounds = self.trial_hits = 0

    def add(self, seen: RoundSample) -> None:
        """Adds the measurement of a round of the current kind."""
        self.rounds += 1
        self.raise_cooldown -= 1
        self.ar_age += 1
        if self.speculating:
            self.speculative_rounds.append(seen)
        else:
            self.ar_seconds.append(seen.seconds)
            self.ar_age = 0

    def apply(self, to: Decision) -> None:
        """Makes `to` the kind of the next rounds, and updates the back-off times."""
        short = self.rounds <= 2 * WINDOW_ROUNDS  # whether the current kind was in use only briefly
        if not to.speculate and not short:
            self.retry_after = RETRY_AFTER_ROUNDS
        if to.speculate and not self.speculating and self.rounds >= self.retry_after:
            factor = FAILED_RETRY_FACTOR if self.rarely_accepts else 2
            self.retry_after = min(factor * self.retry_after, MAX_RETRY_ROUNDS)
            self._begin_trial()
        if to.speculate and (to.steps, to.nodes) != (self.steps, self.nodes):
            if self.speculative_rounds:
                self.verify_times[self.nodes] = median(tree.target for tree in self.speculative_rounds)
            if short and self.raised and (to.steps < self.steps or to.nodes < self.nodes):
                self.raise_cooldown = RAISE_COOLDOWN_ROUNDS
            self.raised = to.steps > self.steps or to.nodes > self.nodes
            self.steps, self.nodes = to.steps, to.nodes
        self.speculating, self.rounds = to.speculate, 0
