"""Step times of another machine: a small model that takes at least as long as a large one would.

Everything around it (trees, messages, caches, samplers) is the real thing, so a laptop can run it at the pace of eight
GPUs. A rank that is ahead of that pace sleeps, so that more ranks than cores do not slow each other.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from swiftspec.runtime.around import AroundModel, T
from swiftspec.runtime.runner import Model

SPIN = 120e-6  # seconds before the moment from which on a waiting rank spins: a sleep may end this late


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a forward: `points` are (TP size, rows, seconds), at least one.

    Between given row counts it is linear, between given TP sizes linear in the logarithms; outside them constant.
    """

    points: tuple[tuple[int, int, float], ...]

    def at(self, tp: int, rows: int) -> float:
        """Seconds of a forward over `rows` on a group of `tp` ranks."""
        sizes = sorted({size for size, _, _ in self.points})
        below, above = _around(sizes, tp)
        low, high = self._of_rows(below, rows), self._of_rows(above, rows)
        if below == above:
            return low
        share = math.log(tp / below) / math.log(above / below)
        return low ** (1 - share) * high**share

    def _of_rows(self, tp: int, rows: int) -> float:
        times = {count: seconds for size, count, seconds in self.points if size == tp}
        below, above = _around(sorted(times), rows)
        if below == above:
            return times[below]
        return times[below] + (times[above] - times[below]) * (rows - below) / (above - below)


@dataclass(frozen=True, slots=True)
class Emulation:
    """Step times of both models; None: as fast as it goes."""

    target: StepTimes | None = None
    draft: StepTimes | None = None

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Emulation:
        """What `dataclasses.asdict` made of one, JSON in between or not."""
        sides = {
            side: StepTimes(tuple((int(tp), int(rows), float(seconds)) for tp, rows, seconds in times["points"]))
            for side, times in data.items() if times is not None
        }  # fmt: skip
        return Emulation(**sides)


class PacedModel(AroundModel):
    """A model whose every step, prompt chunks too, takes at least the time of `times`."""

    def __init__(self, model: Model, times: StepTimes) -> None:
        super().__init__(model, self._slowly)
        self._times = times
        self._tp = 1 if model.group is None else model.group.size

    def _slowly(self, rows: int, step: Callable[[], T]) -> T:
        until = time.perf_counter() + self._times.at(self._tp, rows)
        result = step()
        wait_until(until)
        return result


def wait_until(moment: float) -> None:
    """Sleeps, then spins, until `perf_counter` says so: within a few microseconds and without keeping a core."""
    left = moment - time.perf_counter() - SPIN
    if left > 0:
        time.sleep(left)
    while time.perf_counter() < moment:
        pass


def _around(known: list[int], value: int) -> tuple[int, int]:
    """The neighbours of a value in an ascending list: the same one twice where it is there, or lies outside."""
    at = bisect_left(known, value)
    if at == len(known) or known[at] == value or at == 0:
        return known[min(at, len(known) - 1)], known[min(at, len(known) - 1)]
    return known[at - 1], known[at]
