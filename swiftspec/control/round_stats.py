"""What the latest rounds took and what they gave. The policy knows nothing else."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from swiftspec.config import EngineConfig

WINDOW_ROUNDS = 16  # speculative rounds that a judgement rests on
PROBE_ROUNDS = 4  # plain rounds that it rests on
RETRY_AFTER_ROUNDS = 64  # plain rounds before speculation is tried again; this doubles whenever such a trial fails
MAX_RETRY_ROUNDS = 16 * RETRY_AFTER_ROUNDS  # but never beyond this
RAISE_COOLDOWN_ROUNDS = (
    120  # rounds in which d and bs are not raised, after one of them was raised and soon lowered again
)


class Decision(NamedTuple):
    """What kind of round comes next. A plain round has d = 0 and bs = 1: only the root is verified."""

    steps: int  # d, the draft's expansions
    nodes: int  # bs, the nodes that are verified
    speculate: bool  # whether the draft is asked at all


NO_SPECULATION = Decision(0, 1, False)


class RoundSample(NamedTuple):
    """One round. Times are in seconds. A plain round has no draft, gives one token and has no hits."""

    seconds: float  # the whole round, without the time that the consumer of its tokens took
    target: float  # from the proposal to the result
    draft: float  # in the draft's forwards
    tokens: int
    hits: tuple[int, ...]  # the nodes that the text went through, as indices into what the draft proposed


@dataclass(slots=True)
class RoundStats:
    """The kind of rounds in use and what was measured lately. It is kept from one request to the next."""

    config: EngineConfig  # says what may be decided
    steps: int = field(init=False)  # d and bs of a speculative round
    nodes: int = field(init=False)
    speculating: bool = True
    rounds: int = 0  # measured since one of the three above changed
    speculative_rounds: deque[RoundSample] = field(
        default_factory=lambda: deque(maxlen=WINDOW_ROUNDS)
    )  # the latest speculative rounds
    ar_seconds: deque[float] = field(
        default_factory=lambda: deque(maxlen=PROBE_ROUNDS)
    )  # seconds of the latest plain rounds
    ar_age: int = 0  # rounds measured since the latest plain one
    verify_times: dict[int, float] = field(
        default_factory=dict
    )  # by bs, seconds of a verification when it was last in use
    retry_after: int = RETRY_AFTER_ROUNDS  # plain rounds before speculation is tried again
    raised: bool = False  # d or bs is larger than before the latest change of shape
    raise_cooldown: int = 0  # rounds before d or bs may be raised

    def __post_init__(self) -> None:
        self.steps, self.nodes = self.config.initial_draft_steps, self.config.verify_batch

    @property
    def current(self) -> Decision:
        """The kind of rounds in use."""
        return Decision(self.steps, self.nodes, True) if self.speculating else NO_SPECULATION

    @property
    def speculative_round_time(self) -> float | None:
        """Seconds of a speculative round. This and all other times are medians, since a single round may be delayed."""
        return median(tree.seconds for tree in self.speculative_rounds) if self.speculative_rounds else None

    @property
    def ar_round_time(self) -> float | None:
        """Seconds of a plain round."""
        return median(self.ar_seconds) if self.ar_seconds else None

    def start_request(self) -> None:
        """A request begins. It speculates, with the d and bs that the request before it ended with. Where that one
        ended with plain rounds, speculation is judged only after a full window of new rounds. What was tried in vain on
        the text before may be tried again at once."""
        if not self.speculating:
            self.speculating, self.rounds = True, 0
        self.retry_after, self.raise_cooldown = RETRY_AFTER_ROUNDS, 0

    def add(self, seen: RoundSample) -> None:
        """Takes in a round of the kind in use."""
        self.rounds += 1
        self.raise_cooldown -= 1
        self.ar_age += 1
        if self.speculating:
            self.speculative_rounds.append(seen)
        else:
            self.ar_seconds.append(seen.seconds)
            self.ar_age = 0

    def apply(self, to: Decision) -> None:
        """The next rounds are of another kind."""
        short = self.rounds <= 2 * WINDOW_ROUNDS  # what is left now was not in use for long
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
