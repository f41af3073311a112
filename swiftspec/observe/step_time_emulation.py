"""Emulated step times: a small model that takes as long for each step as a large one would.

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

SPIN_S = 120e-6  # stop sleeping this many seconds before the deadline and spin: a sleep may end that much too late


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
class StepTimeEmulation:
    """Step times of both models; None: as fast as it goes."""

    target: StepTimes | None = None
    draft: StepTimes | None = None

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> StepTimeEmulation:
        """What `dataclasses.asdict` made of one, JSON in between or not."""
        sides = {
            side: StepTimes(tuple((int(tp), int(rows), float(seconds)) for tp, rows, seconds in times["points"]))
            for side, times in data.items() if times is not None
        }  # fmt: skip
        return StepTimeEmulation(**sides)


def make_hook(times: StepTimes, tp: int) -> Callable[[float, int], None]:
    """Makes every step of a model on `tp` ranks, prompt chunks too, last at least as long as `times` say; see
    `Runner.hooks`."""

    def wait(began: float, rows: int) -> None:
        wait_until(began + times.at(tp, rows))

    return wait


def wait_until(moment: float) -> None:
    """Sleeps, then spins, until `perf_counter` says so: within a few microseconds and without keeping a core."""
    left = moment - time.perf_counter() - SPIN_S
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
