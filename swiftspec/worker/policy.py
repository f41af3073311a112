"""Whether to speculate at all: the self-switch, which measures and never changes a token.

Speculation pays where a round's tokens outweigh its time: with n tokens a round, t the time of a round and t_1 that of
plain decoding's, the speedup is n t_1 / t, and n = t / t_1 is the break-even (seed 003). Both times are measured on the
request itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from swiftspec.batch import Proposal, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.worker.drafter import Drafter, NoDrafter

SKIP = 2  # rounds after a change that are not measured: caches, and a draft that has to catch up
WINDOW = 16  # speculative rounds that are judged
PROBE = 4  # plain rounds that tell their time
REFRESH = 512  # rounds after which that is measured anew
PATIENCE = 64  # plain rounds before speculation is tried again; twice as many after each refusal
DOUBLINGS = 4
MARGIN = 1.05  # speculation may seem so much slower before it is given up


class Decision(NamedTuple):
    """The shape of the next round: expansions, nodes verified, and whether the drafter is asked at all."""

    steps: int  # d
    nodes: int  # bs
    speculate: bool


@dataclass(slots=True)
class Pace:
    """What was measured, in seconds; medians, since a machine has hiccups."""

    steps: int  # d and bs of a speculative round
    nodes: int
    speculating: bool = True
    rounds: int = 0  # since the last change
    refusals: int = 0  # in a row
    age: int = 0  # rounds since a plain one was measured
    trees: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))  # seconds, tokens
    plains: deque[float] = field(default_factory=lambda: deque(maxlen=2 * PROBE))  # a round is a token

    @property
    def tree_round(self) -> float | None:
        """Seconds of a speculative round."""
        return median(seconds for seconds, _ in self.trees) if self.trees else None

    @property
    def plain_round(self) -> float | None:
        """Seconds of a plain round."""
        return median(self.plains) if self.plains else None

    @property
    def break_even(self) -> float | None:
        """Tokens that a speculative round has to give; None before both times are known."""
        tree, plain = self.tree_round, self.plain_round
        return tree / plain if tree is not None and plain else None

    @property
    def speedup(self) -> float | None:
        """Of speculation over plain decoding, lately."""
        need = self.break_even
        return sum(tokens for _, tokens in self.trees) / len(self.trees) / need if need else None

    def begin(self) -> None:
        """A request begins: speculating, whatever the one before came to. What plain rounds took still holds."""
        self.speculating, self.rounds, self.refusals = True, 0, 0
        self.trees.clear()

    def see(self, seconds: float, tokens: int) -> None:
        """Takes in a round."""
        self.rounds += 1
        self.age += 1
        if self.rounds <= SKIP:
            return
        if self.rounds == SKIP + 1 and self.speculating:
            self.trees.clear()  # not before: until then the rounds before the change are the latest news
        if self.speculating:
            self.trees.append((seconds, tokens))
        else:
            self.plains.append(seconds)
            self.age = 0

    def turn(self, speculate: bool) -> None:
        """The next round is of the other kind."""
        if not speculate:
            if self.rounds > 2 * (SKIP + WINDOW):  # more than a trial
                self.refusals = 0
            if self.age > REFRESH:
                self.plains.clear()
        else:
            self.refusals = 0 if _pays(self) else self.refusals + 1
        self.speculating, self.rounds = speculate, 0


def decide(pace: Pace) -> Decision:
    """The next round, by the measured times of those before.

    Speculation goes on while it pays. Plain rounds come in when their time is not known, or long ago, and then for a
    moment only; when it does not pay, for a stretch, after which it is tried again.
    """
    if pace.speculating:
        judged = pace.rounds >= SKIP + WINDOW
        speculate = not judged or (pace.plain_round is not None and pace.age <= REFRESH and _pays(pace))
    elif pace.rounds < SKIP + PROBE:
        speculate = False
    else:
        speculate = _pays(pace) or pace.rounds >= PATIENCE << min(pace.refusals, DOUBLINGS)
    return Decision(pace.steps, pace.nodes, True) if speculate else Decision(0, 1, False)


def _pays(pace: Pace) -> bool:
    speedup = pace.speedup
    return speedup is None or speedup * MARGIN >= 1


@dataclass(frozen=True, slots=True)
class Switching:
    """What the self-switch did in one request, and its latest measurements. Times in seconds."""

    plain_rounds: int
    changes: tuple[tuple[int, Decision], ...]  # from which round on what was decided
    tree_round: float | None
    plain_round: float | None
    break_even: float | None
    speedup: float | None


class SelfSwitch:
    """Stands for a drafter, and in plain rounds for none; the drafter then sleeps, and catches up in one step.

    It runs on rank 0, which alone has a clock; its decision travels as the proposal, root-only or not.
    """

    def __init__(self, drafter: Drafter, pace: Pace, clock: Callable[[], float] = time.perf_counter) -> None:
        self._drafter, self._none = drafter, NoDrafter()
        self._clock = clock
        self.pace = pace
        self._plain_rounds = 0
        self._changes: list[tuple[int, Decision]] = []
        self._missed: list[VerifyResult] = []
        self._began = 0.0

    @property
    def busy(self) -> float:
        return self._drafter.busy

    def open(self, request: int, tokens: Sequence[int], sampling: SamplingParams, prompt_len: int) -> None:
        self.pace.begin()
        self._none.open(request, tokens, sampling, prompt_len)
        self._drafter.open(request, tokens, sampling, prompt_len)

    def propose(self) -> Proposal:
        self._began = self._clock()
        if not self.pace.speculating:
            return self._none.propose()
        self._catch_up()
        return self._drafter.propose()

    def grow(self) -> None:
        if self.pace.speculating:
            self._drafter.grow()

    def observe(self, result: VerifyResult) -> None:
        if self.pace.speculating:
            self._drafter.observe(result)
        else:
            self._missed.append(result)
            self._plain_rounds += 1
        self._none.observe(result)
        self.pace.see(self._clock() - self._began, len(result.tokens))
        decision = decide(self.pace)
        if decision.speculate != self.pace.speculating:
            self.pace.turn(decision.speculate)
            self._changes.append((result.round + 1, decision))

    def close(self) -> None:
        self._drafter.close()

    def report(self) -> Switching:
        """So far."""
        p = self.pace
        times = p.tree_round, p.plain_round, p.break_even, p.speedup
        return Switching(self._plain_rounds, tuple(self._changes), *times)

    def _catch_up(self) -> None:
        """Tells the drafter what it missed, as the result of one long round."""
        if self._missed:
            tokens = tuple(token for result in self._missed for token in result.tokens)
            first, last = self._missed[0], self._missed[-1]
            path = tuple(range(len(tokens)))
            self._drafter.observe(VerifyResult(last.request, last.round, first.prefix_len, path, tokens))
            self._missed.clear()
