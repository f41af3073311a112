"""Measurements of recent rounds, the only input of the policy."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from swiftspec.config import EngineConfig

WINDOW_ROUNDS = 16  # speculative rounds that a decision is based on
PROBE_ROUNDS = 4  # autoregressive rounds that a decision is based on
RETRY_AFTER_ROUNDS = 64  # autoregressive rounds before speculation is retried; doubles after a failed trial
MAX_RETRY_ROUNDS = 16 * RETRY_AFTER_ROUNDS  # upper bound of that number
RAISE_COOLDOWN_ROUNDS = 120  # rounds without an increase of d or bs, after an increase that was soon reverted


class Decision(NamedTuple):
    """Kind of the next rounds. An autoregressive round has d = 0 and bs = 1: only the root is verified."""

    steps: int  # d, expansions per round
    nodes: int  # bs, verified nodes
    speculate: bool  # whether the draft is used


NO_SPECULATION = Decision(0, 1, False)


class RoundSample(NamedTuple):
    """Measurement of one round; times in seconds. An autoregressive round has no draft, one token and no hits."""

    seconds: float  # duration of the round, excluding the consumer of its tokens
    target: float  # from the proposal to the result
    draft: float  # in the draft's forwards
    tokens: int
    hits: tuple[int, ...]  # accepted nodes, as indices into the draft's uncut proposal


@dataclass(slots=True)
class RoundStats:
    """The current kind of rounds and recent measurements. Kept across requests."""

    config: EngineConfig  # determines what is adaptive
    steps: int = field(init=False)  # d and bs of a speculative round
    nodes: int = field(init=False)
    speculating: bool = True
    rounds: int = 0  # rounds measured since steps, nodes or speculating changed
    speculative_rounds: deque[RoundSample] = field(
        default_factory=lambda: deque(maxlen=WINDOW_ROUNDS)
    )  # recent speculative rounds
    ar_seconds: deque[float] = field(
        default_factory=lambda: deque(maxlen=PROBE_ROUNDS)
    )  # seconds of recent autoregressive rounds
    ar_age: int = 0  # rounds measured since the last autoregressive one
    verify_times: dict[int, float] = field(default_factory=dict)  # seconds of a verification by bs, as last measured
    retry_after: int = RETRY_AFTER_ROUNDS  # autoregressive rounds before speculation is retried
    raised: bool = False  # the last change of shape increased d or bs
    raise_cooldown: int = 0  # rounds before d or bs may be increased

    def __post_init__(self) -> None:
        self.steps, self.nodes = self.config.initial_draft_steps, self.config.verify_batch

    @property
    def current(self) -> Decision:
        """The current kind of rounds."""
        return Decision(self.steps, self.nodes, True) if self.speculating else NO_SPECULATION

    @property
    def speculative_round_time(self) -> float | None:
        """Seconds of a speculative round. All times are medians, since a single round may be delayed."""
        return median(tree.seconds for tree in self.speculative_rounds) if self.speculative_rounds else None

    @property
    def ar_round_time(self) -> float | None:
        """Seconds of an autoregressive round."""
        return median(self.ar_seconds) if self.ar_seconds else None

    def start_request(self) -> None:
        """Begins a request. It speculates with the d and bs at the end of the previous request. If that ended with
        autoregressive rounds, speculation is judged only after a full window of new rounds. Back-off times of the
        previous request are reset."""
        if not self.speculating:
            self.speculating, self.rounds = True, 0
        self.retry_after, self.raise_cooldown = RETRY_AFTER_ROUNDS, 0

    def add(self, seen: RoundSample) -> None:
        """Adds a round of the current kind."""
        self.rounds += 1
        self.raise_cooldown -= 1
        self.ar_age += 1
        if self.speculating:
            self.speculative_rounds.append(seen)
        else:
            self.ar_seconds.append(seen.seconds)
            self.ar_age = 0

    def apply(self, to: Decision) -> None:
        """Switches the next rounds to another kind."""
        short = self.rounds <= 2 * WINDOW_ROUNDS  # the shape was in use only briefly
        if not to.speculate and not short:
            self.retry_after = RETRY_AFTER_ROUNDS
        if to.speculate and not self.speculating and self.rounds >= self.retry_after:
            self.retry_after = min(2 * self.retry_after, MAX_RETRY_ROUNDS)
        if to.speculate and (to.steps, to.nodes) != (self.steps, self.nodes):
            if self.speculative_rounds:
                self.verify_times[self.nodes] = median(tree.target for tree in self.speculative_rounds)
            if short and self.raised and (to.steps < self.steps or to.nodes < self.nodes):
                self.raise_cooldown = RAISE_COOLDOWN_ROUNDS
            self.raised = to.steps > self.steps or to.nodes > self.nodes
            self.steps, self.nodes = to.steps, to.nodes
        self.speculating, self.rounds = to.speculate, 0
