"""How the next round is to be: how many expansions, how many nodes, and whether to speculate at all.

`decide` is a pure function of a `Pace`, which holds what was measured on the request itself. Nothing that it decides
changes a token. With n tokens a round, t the time of a round and t_1 that of a plain one, the speedup of speculation is
n t_1 / t, and n = t / t_1 is the break-even (seed 003).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile
from statistics import median
from typing import NamedTuple

from swiftspec.config import EngineConfig
from swiftspec.control.forecast import AheadForecast, Forecast, Seen, quartile
from swiftspec.control.measure import MOST_STEPS, DraftTimes, steps_for
from swiftspec.observe.emulate import StepTimes

SKIP = 2  # rounds after a change that are not measured: caches, and a draft that has to catch up
WINDOW = 16  # speculative rounds that are judged
HISTORY = 24  # and at most
PROBE = 4  # plain rounds that tell their time
REFRESH = 512  # rounds after which that is measured anew
PATIENCE = 64  # rounds before what was given up is tried again; twice as many after each refusal
DOUBLINGS = 4
EVERY = 8  # rounds after which all this is thought of again, which takes a tenth of a millisecond
MARGIN = 1.05  # speculation may seem so much slower before it is given up
GAIN = 1.04  # another shape must promise so much before it is taken
BAND = 1.05  # and the ratio of step times leave d by so much
REACH = 2  # d moves by so much at a time: beyond that its effect is a guess


class Decision(NamedTuple):
    """The shape of the next round: expansions, nodes verified, and whether the drafter is asked at all."""

    steps: int  # d
    nodes: int  # bs
    speculate: bool


@dataclass(slots=True)
class Pace:
    """What was measured, in seconds; medians, since a machine has hiccups. And what may be decided."""

    steps: int  # d and bs of a speculative round
    nodes: int
    deepest: int | None = None  # d lies in 1..deepest; None: it is fixed
    batches: tuple[int, ...] = ()  # the values of bs; empty: it is fixed
    ahead: bool = False  # the draft grows while the target verifies
    switches: bool = True  # rounds may be plain
    speculating: bool = True
    rounds: int = 0  # since the last change
    refusals: int = 0  # in a row
    age: int = 0  # rounds since a plain one was measured
    count: int = 0  # rounds in all
    unseen: int = 0  # rounds of a request that has just begun, which are not measured
    stale: bool = False  # the trees are of before the last change
    before: tuple[int, int] | None = None  # the shape that was left for this one
    shunned: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)  # until which round, how often so far
    targets: dict[int, float] = field(default_factory=dict)  # verifications by their rows, of shapes that were left
    trees: deque[Seen] = field(default_factory=lambda: deque(maxlen=HISTORY))
    plains: deque[float] = field(default_factory=lambda: deque(maxlen=2 * PROBE))  # a round is a token

    @staticmethod
    def of(plan: EngineConfig) -> Pace:
        """What a plan leaves open."""
        halves = takewhile(lambda bs: bs > 1, (plan.verify_batch >> i for i in range(plan.verify_batch)))
        batches = tuple(halves) if plan.adapt_batch else ()
        deepest = max(MOST_STEPS, plan.steps) if plan.adapt_steps else None
        return Pace(plan.steps, plan.verify_batch, deepest, batches, plan.mode == "async", plan.self_switch)

    @property
    def tree_round(self) -> float | None:
        """Seconds of a speculative round."""
        return median(seen.seconds for seen in self.trees) if self.trees else None

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
        return sum(seen.tokens for seen in self.trees) / len(self.trees) / need if need else None

    def begin(self) -> None:
        """A request begins: speculating, in the shape of the one before. What was seen of that still holds, unless it
        ended plainly; what plain rounds took holds anyway."""
        if not self.speculating:
            self.speculating, self.stale, self.rounds = True, False, 0
            self.trees.clear()
        self.refusals, self.unseen = 0, SKIP

    def see(self, seen: Seen) -> None:
        """Takes in a round."""
        self.rounds += 1
        self.age += 1
        self.count += 1
        self.unseen -= 1
        if self.rounds <= SKIP or self.unseen >= 0:
            return
        if self.speculating:
            if self.stale:
                self.trees.clear()  # not before: until now the rounds before the change were the latest news
            self.stale = False
            self.trees.append(seen)
        else:
            self.plains.append(seen.seconds)
            self.age = 0

    def turn(self, decision: Decision) -> None:
        """The next round is of another kind, or of another shape."""
        long = self.rounds > 2 * (SKIP + WINDOW)  # more than a trial
        if not decision.speculate:
            self.before = None
            if long:
                self.refusals = 0
            if self.age > REFRESH:
                self.plains.clear()
        else:
            if not self.speculating:
                self.refusals = 0 if _pays(self) else self.refusals + 1
            self._reshape(decision.steps, decision.nodes, long)
        self.speculating, self.stale, self.rounds = decision.speculate, True, 0

    def _reshape(self, steps: int, nodes: int, long: bool) -> None:
        """What was tried and left at once for what it had replaced is not tried again soon."""
        shape = self.steps, self.nodes
        if shape == (steps, nodes):
            return
        if (steps, nodes) == self.before and not long:
            times = self.shunned.get(shape, (0, 0))[1]
            self.shunned[shape] = self.count + (PATIENCE << min(times, DOUBLINGS)), times + 1
        if self.trees:
            self.targets[self.nodes] = median(seen.target for seen in self.trees)
        self.steps, self.nodes, self.before = steps, nodes, shape


def decide(pace: Pace) -> Decision:
    """The next round, by what those before have shown.

    Speculation goes on while it pays, in the shape that promises most. Plain rounds come in when their time is not
    known, or long ago, and then for a moment only; when it does not pay, for a stretch, after which it is tried again.
    """
    judged = pace.rounds - SKIP - (WINDOW if pace.speculating else PROBE)
    if judged < 0 or (pace.speculating and judged % EVERY != 0):
        return Decision(pace.steps, pace.nodes, True) if pace.speculating else Decision(0, 1, False)
    steps, nodes, gain = _shape(pace) if judged % EVERY == 0 else (pace.steps, pace.nodes, 1.0)
    if not pace.switches:
        speculate = True
    elif pace.speculating:
        known = pace.plain_round is not None and pace.age <= REFRESH
        speculate = known and _pays(pace, gain)
        if known and not speculate and judged == 0 and pace.before is not None and not _shuns(pace, pace.before):
            return Decision(*pace.before, True)  # a shape just tried does not pay; perhaps the one before still does
    else:
        speculate = _pays(pace, gain) or pace.rounds >= PATIENCE << min(pace.refusals, DOUBLINGS)
    return Decision(steps, nodes, True) if speculate else Decision(0, 1, False)


def _pays(pace: Pace, gain: float = 1.0) -> bool:
    speedup = pace.speedup
    return speedup is None or speedup * gain * MARGIN >= 1


def _shape(pace: Pace) -> tuple[int, int, float]:
    """(d, bs, how much faster than now)."""
    if len(pace.trees) < WINDOW or not (pace.deepest or pace.batches):
        return pace.steps, pace.nodes, 1.0
    if pace.ahead:
        return _shape_ahead(pace)
    low, high = (1, pace.deepest) if pace.deepest else (pace.steps, pace.steps)
    depths = range(max(low, pace.steps - REACH), min(high, pace.steps + REACH) + 1)
    shapes = [(d, bs) for d in depths for bs in pace.batches or (pace.nodes,)]
    forecast = _forecast(pace)
    now = forecast.speed(pace.steps, pace.nodes)
    gains = {shape: forecast.speed(*shape) / now for shape in shapes if not _shuns(pace, shape)}
    best = max(gains, key=gains.__getitem__, default=(pace.steps, pace.nodes))
    return (*best, gains[best]) if gains.get(best, 0.0) > GAIN else (pace.steps, pace.nodes, 1.0)


def _shuns(pace: Pace, shape: tuple[int, int]) -> bool:
    return pace.count < pace.shunned.get(shape, (0, 0))[0]


def _shape_ahead(pace: Pace) -> tuple[int, int, float]:
    """The same for a draft that grows ahead: d as many expansions as fit into a verification, or more than that, for
    which the target then waits, where they promise to be worth it."""
    forecast, here = _forecast(pace), (pace.steps, pace.nodes)
    start = (_in_step(pace, pace.nodes) if pace.deepest else pace.steps), pace.nodes
    if pace.steps > start[0] and forecast.speed(*here) >= forecast.speed(*start):
        start = here
    shapes = {here, start}
    for bs in pace.batches or (pace.nodes,):
        least = _in_step(pace, bs) if pace.deepest else pace.steps
        most = min(least + REACH, pace.deepest) if pace.deepest else pace.steps
        shapes |= {(d, bs) for d in range(least, most + 1)}
    speeds = {shape: forecast.speed(*shape) for shape in shapes if not _shuns(pace, shape)}
    best = max(sorted(speeds), key=speeds.__getitem__, default=start)
    if speeds.get(best, 0.0) <= GAIN * forecast.speed(*start):
        best = start
    now = forecast.speed(*here)
    return (*best, forecast.speed(*best) / now if now > 0 else 1.0)


def _in_step(pace: Pace, nodes: int) -> int:
    """d for a draft that grows ahead (paper, section 3.1): as many expansions as fit into a verification of so many
    nodes beside the draft's turn. It stays while the ratio is no further from it than the band.

    An answer counts expansions that its round had to have besides; a quartile is of a round without.
    """
    target = min(seen.target for seen in pace.trees)
    expansion = quartile([seen.draft for seen in pace.trees]) / pace.steps
    if expansion <= 0:
        return pace.steps
    late = max(pace.steps * expansion - target, 0.0)
    draft = DraftTimes(max(quartile([seen.wait for seen in pace.trees]) - late, 0.0), expansion)
    if nodes != pace.nodes:
        times = _targets(pace)
        return steps_for(target * times.at(1, nodes) / times.at(1, pace.nodes), draft)
    least, most = steps_for(target / BAND, draft), steps_for(target * BAND, draft)
    return min(max(pace.steps, least), most)


def _forecast(pace: Pace) -> Forecast:
    kind = AheadForecast if pace.ahead else Forecast
    return kind(list(pace.trees), pace.steps, pace.nodes, {*pace.batches, pace.nodes}, _targets(pace))


def _targets(pace: Pace) -> StepTimes:
    """Verifications by their rows, as far as they have been seen; beyond that as the nearest."""
    now = {pace.nodes: median(seen.target for seen in pace.trees)}
    known = pace.targets | now | ({1: median(pace.plains)} if pace.plains else {})
    return StepTimes(tuple((1, rows, seconds) for rows, seconds in known.items()))
