"""Emulated step times: a small model that takes as long for each step as a large one would.

Everything around it (trees, messages, caches, samplers) is real, so a laptop can run at the pace of eight GPUs. A rank
that is ahead of that pace sleeps, so that more ranks than cores do not slow each other down.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SPIN_S = 120e-6  # a sleep may end this much too late: spin for the last part


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds per forward: `points` are (TP size, rows, seconds), at least one.

    Linear between given row counts, linear in the logarithms between given TP sizes, constant outside.
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
class StepTimeEmulation:
    """Step times of both models; None: not emulated."""

    target: StepTimes | None = None
    draft: StepTimes | None = None

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> StepTimeEmulation:
        """The inverse of `dataclasses.asdict`, also after a round trip through JSON."""
        sides = {
            side: StepTimes(tuple((int(tp), int(rows), float(seconds)) for tp, rows, seconds in times["points"]))
            for side, times in data.items() if times is not None
        }  # fmt: skip
        return StepTimeEmulation(**sides)


def make_hook(times: StepTimes, tp: int) -> Callable[[float, int], None]:
    """A hook (see `Runner.hooks`) that prolongs every step of a model on `tp` ranks, prefill chunks included, to the
    given times."""

    def wait(began: float, rows: int) -> None:
        wait_until(began + times.at(tp, rows))

    return wait


def wait_until(moment: float) -> None:
    """Sleeps, then spins, until `moment` (`perf_counter`): exact to a few microseconds, without occupying a core."""
    left = moment - time.perf_counter() - SPIN_S
    if left > 0:
        time.sleep(left)
    while time.perf_counter() < moment:
        pass


def _around(known: list[int], value: int) -> tuple[int, int]:
    """The neighbours of a value in an ascending list; the same one twice if the value is in the list or outside."""
    at = bisect_left(known, value)
    if at == len(known) or known[at] == value or at == 0:
        return known[min(at, len(known) - 1)], known[min(at, len(known) - 1)]
    return known[at - 1], known[at]
