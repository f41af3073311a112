"""What the latest rounds took and what they gave. The policy knows nothing else."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from swiftspec.config import EngineConfig

WINDOW = 16  # speculative rounds that a judgement rests on
PROBE = 4  # plain rounds that it rests on
PATIENCE = 64  # plain rounds before speculation is tried again; this doubles whenever such a trial fails
LONGEST = 16 * PATIENCE  # but never beyond this
HOLD = 120  # rounds in which d and bs are not raised, after one of them was raised and soon lowered again


class Decision(NamedTuple):
    """What kind of round comes next. A plain round has d = 0 and bs = 1: only the root is verified."""

    steps: int  # d, the draft's expansions
    nodes: int  # bs, the nodes that are verified
    speculate: bool  # whether the draft is asked at all


PLAIN = Decision(0, 1, False)


class MeasuredRound(NamedTuple):
    """One round. Times are in seconds. A plain round has no draft, gives one token and has no hits."""

    seconds: float  # the whole round, without the time that the consumer of its tokens took
    target: float  # from the proposal to the result
    draft: float  # in the draft's forwards
    tokens: int
    hits: tuple[int, ...]  # the nodes that the text went through, as indices into what the draft proposed


@dataclass(slots=True)
class Measured:
    """The kind of rounds in use and what was measured lately. It is kept from one request to the next."""

    config: EngineConfig  # says what may be decided
    steps: int = field(init=False)  # d and bs of a speculative round
    nodes: int = field(init=False)
    speculating: bool = True
    rounds: int = 0  # measured since one of the three above changed
    trees: deque[MeasuredRound] = field(default_factory=lambda: deque(maxlen=WINDOW))  # the latest speculative rounds
    plains: deque[float] = field(default_factory=lambda: deque(maxlen=PROBE))  # seconds of the latest plain rounds
    plain_age: int = 0  # rounds measured since the latest plain one
    targets: dict[int, float] = field(default_factory=dict)  # by bs, seconds of a verification when it was last in use
    patience: int = PATIENCE  # plain rounds before speculation is tried again
    raised: bool = False  # d or bs is larger than before the latest change of shape
    hold: int = 0  # rounds before d or bs may be raised

    def __post_init__(self) -> None:
        self.steps, self.nodes = self.config.steps, self.config.verify_batch

    @property
    def current(self) -> Decision:
        """The kind of rounds in use."""
        return Decision(self.steps, self.nodes, True) if self.speculating else PLAIN

    @property
    def tree_round(self) -> float | None:
        """Seconds of a speculative round. This and all other times are medians, since a single round may be delayed."""
        return median(tree.seconds for tree in self.trees) if self.trees else None

    @property
    def plain_round(self) -> float | None:
        """Seconds of a plain round."""
        return median(self.plains) if self.plains else None

    def begin(self) -> None:
        """A request begins. It speculates, with the d and bs that the request before it ended with. Where that one
        ended with plain rounds, speculation is judged only after a full window of new rounds. What was tried in vain on
        the text before may be tried again at once."""
        if not self.speculating:
            self.speculating, self.rounds = True, 0
        self.patience, self.hold = PATIENCE, 0

    def add(self, seen: MeasuredRound) -> None:
        """Takes in a round of the kind in use."""
        self.rounds += 1
        self.hold -= 1
        self.plain_age += 1
        if self.speculating:
            self.trees.append(seen)
        else:
            self.plains.append(seen.seconds)
            self.plain_age = 0

    def change(self, to: Decision) -> None:
        """The next rounds are of another kind."""
        short = self.rounds <= 2 * WINDOW  # what is left now was not in use for long
        if not to.speculate and not short:
            self.patience = PATIENCE
        if to.speculate and not self.speculating and self.rounds >= self.patience:
            self.patience = min(2 * self.patience, LONGEST)
        if to.speculate and (to.steps, to.nodes) != (self.steps, self.nodes):
            if self.trees:
                self.targets[self.nodes] = median(tree.target for tree in self.trees)
            if short and self.raised and (to.steps < self.steps or to.nodes < self.nodes):
                self.hold = HOLD
            self.raised = to.steps > self.steps or to.nodes > self.nodes
            self.steps, self.nodes = to.steps, to.nodes
        self.speculating, self.rounds = to.speculate, 0
