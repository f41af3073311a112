"""Emulated step times: a small model takes as long for each step as a large one would.

Everything else (trees, messages, caches, samplers) is real, so a laptop can run at the pace of eight GPUs. A rank
sleeps until the emulated time has passed, so that ranks that share a core do not slow each other down.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SPIN_S = 120e-6  # the last part of a wait, spent spinning, because a sleep may end this much too late


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Step times in seconds as a function of TP size and rows, interpolated between given points.

    Between row counts the interpolation is linear, between TP sizes linear in the logarithms. Beyond the given points
    the step time is constant.

    `points`: (TP size, rows, seconds), at least one.
    """

    points: tuple[tuple[int, int, float], ...]

    def at(self, tp: int, rows: int) -> float:
        """Returns the seconds of a forward over `rows` rows on a group of `tp` ranks."""
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
class StepTimeEmulation:
    """Emulated step times of both models. None: the model runs at its own speed."""

    target: StepTimes | None = None
    draft: StepTimes | None = None

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> StepTimeEmulation:
        """Creates an object from the result of `dataclasses.asdict`, also after a round trip through JSON."""
        sides = {
            side: StepTimes(tuple((int(tp), int(rows), float(seconds)) for tp, rows, seconds in times["points"]))
            for side, times in data.items()
            if times is not None
        }
        return StepTimeEmulation(**sides)


def make_hook(times: StepTimes, tp: int) -> Callable[[float, int], None]:
    """Returns a hook for `Runner.hooks` that prolongs each step of a model on `tp` ranks to its step time in `times`.
    Prefill chunks are steps too."""

    def wait(began: float, rows: int) -> None:
        wait_until(began + times.at(tp, rows))

    return wait


def wait_until(moment: float) -> None:
    """Blocks until the `perf_counter` time `moment`, exact to a few microseconds. Sleeps, then spins for SPIN_S."""
    left = moment - time.perf_counter() - SPIN_S
    if left > 0:
        time.sleep(left)
    while time.perf_counter() < moment:
        pass


def _around(known: list[int], value: int) -> tuple[int, int]:
    """Returns the elements of the ascending list `known` just below and above `value`. If `value` is an element or lies
    outside the list's range, returns the nearest element twice."""
    at = bisect_left(known, value)
    if at == len(known) or known[at] == value or at == 0:
        return known[min(at, len(known) - 1)], known[min(at, len(known) - 1)]
    return known[at - 1], known[at]
