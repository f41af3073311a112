"""What rounds of another shape would give, by those that were seen: arithmetic only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from statistics import median
from typing import NamedTuple

from swiftspec.observe.emulate import StepTimes

# What another d changes, on the embedded pair (docs/log.md): a depth not seen yet holds the text with this share of the
# chance of the depth above, and each depth less leaves the others' places for so much more.
DEEPER, SHALLOWER = 0.75, 0.06


class Seen(NamedTuple):
    """A round as it went. Times in seconds."""

    seconds: float  # without the consumer's
    tokens: int
    target: float = 0.0  # from the proposal to the result
    draft: float = 0.0  # in the draft's forwards
    wait: float = 0.0  # for the proposal
    hits: tuple[int, ...] = ()  # the nodes that the text went through, by their place in what the draft proposed


class Forecast:
    """What other shapes would give in turn with the target, by the rounds of this one: `steps` (d) and `nodes` (bs).

    `batches` are the values of bs that may be asked for, `targets` the seconds of a verification by its rows.
    """

    def __init__(
        self, seen: Sequence[Seen], steps: int, nodes: int, batches: Collection[int], targets: StepTimes
    ) -> None:
        target, draft = median(s.target for s in seen), median(s.draft for s in seen)
        self._reached = {bs: _reached([s.hits for s in seen], bs) for bs in batches}
        self._steps = steps
        self._expansion = draft / steps
        self._rest = max(median(s.seconds for s in seen) - target - draft, 0.0)
        self._targets = targets

    def speed(self, steps: int, nodes: int) -> float:
        """Tokens a second."""
        seconds = self._rest + self._targets.at(1, nodes) + steps * self._expansion
        return self.tokens(steps, nodes) / seconds if seconds > 0 else 0.0

    def tokens(self, steps: int, nodes: int) -> float:
        """Of a round. Fewer of the likeliest nodes: counted. Another d: the depths that it leaves out, or would add."""
        reached = self._reached[nodes]
        if steps >= self._steps:
            further = _deeper(reached[: self._steps], steps - self._steps) if len(reached) >= self._steps else []
            return 1 + sum(reached) + sum(further)
        return 1 + min(sum(reached[:steps]) * (1 + SHALLOWER * (self._steps - steps)), steps)


class AheadForecast(Forecast):
    """The same where the draft grows ahead: a round lasts as long as the slower lane, and then the draft's answer.

    Of d expansions a round leaves d - 1 depths below the root, once all of them were accepted and the bonus token too.
    """

    def __init__(
        self, seen: Sequence[Seen], steps: int, nodes: int, batches: Collection[int], targets: StepTimes
    ) -> None:
        super().__init__(seen, steps, nodes, batches, targets)
        self._expansion = quartile([s.draft for s in seen]) / steps
        lanes = max(targets.at(1, nodes), steps * self._expansion)
        self._rest = max(median(s.seconds for s in seen) - lanes, 0.0)

    def speed(self, steps: int, nodes: int) -> float:
        seconds = self._rest + max(self._targets.at(1, nodes), steps * self._expansion)
        return self.tokens(steps, nodes) / seconds if seconds > 0 else 0.0

    def tokens(self, steps: int, nodes: int) -> float:
        reached = self._reached[nodes]
        if steps < self._steps:
            return 1 + sum(reached[: max(steps - 1, 1)])
        grown = max(self._steps - 1, 1)
        further = _deeper(reached[:grown], steps - self._steps) if len(reached) >= grown else []
        return 1 + sum(reached) + sum(further)


def _reached(hits: Sequence[tuple[int, ...]], nodes: int) -> list[float]:
    """By depth, the share of rounds whose text came that far among so many nodes."""
    lengths = [bisect_left(places, nodes) for places in hits]
    return [sum(length > depth for length in lengths) / len(lengths) for depth in range(max(lengths))]


def _deeper(reached: Sequence[float], depths: int) -> list[float]:
    """The shares of further depths."""
    last = reached[-1]
    chance = last / reached[-2] if len(reached) > 1 else last
    found = []
    for _ in range(depths):
        chance *= DEEPER
        last *= chance
        found.append(last)
    return found


def quartile(values: Sequence[float]) -> float:
    """The lower one."""
    return sorted(values)[len(values) // 4]
