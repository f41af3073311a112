"""Whether two samples come from one distribution: chi-square, Holm's correction, total variation.

Letters: c cells; counts are how often each was seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

MIN_CELL_COUNT = 10  # cells seen less often in both samples together are one cell
RESAMPLES = 1000
TAIL, Z = 0.025, 1.96  # on each side of an interval, and the normal quantile of that
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two samples of one thing. `p`: the chance of a difference as large or larger where there is none."""

    name: str
    cells: int
    square: float
    p: float
    apart: float  # total variation of the two samples
    low: float  # the 95 % interval of that of their laws
    high: float


def compare(name: str, first: Sequence[Hashable], second: Sequence[Hashable], seed: int = 0) -> Comparison:
    """Two samples of equal size, or not."""
    a, b = pooled(first, second)
    square, p = chi_square(a, b)
    apart, low, high = total_variation(a, b, seed)
    return Comparison(name, len(a), square, p, apart, low, high)


def pooled(first: Sequence[Hashable], second: Sequence[Hashable]) -> tuple[Counts, Counts]:
    """Counts of both samples over the same cells; the rare ones are the last cell."""
    one, other = Counter(first), Counter(second)
    often = sorted(
        (x for x in {*one, *other} if one[x] + other[x] >= MIN_CELL_COUNT), key=lambda x: (-one[x] - other[x], str(x))
    )
    a, b = (
        [*(counter[x] for x in often), counter.total() - sum(counter[x] for x in often)] for counter in (one, other)
    )
    if a[-1] + b[-1] == 0:
        a, b = a[:-1], b[:-1]
    return np.array(a, np.int64), np.array(b, np.int64)


def chi_square(a: Counts, b: Counts) -> tuple[float, float]:
    """The statistic of homogeneity of two samples [c] and its p-value, with c - 1 degrees of freedom."""
    if len(a) < 2:
        return 0.0, 1.0
    ratio = (b.sum() / a.sum()) ** 0.5
    square = float(((a * ratio - b / ratio) ** 2 / (a + b)).sum())
    return square, survival(square, len(a) - 1)


def survival(square: float, freedom: int) -> float:
    """The chance that a chi-square variable of so many degrees of freedom is larger."""
    half = torch.tensor([freedom / 2, square / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def holm(p: Sequence[float]) -> list[float]:
    """The p-values corrected for their number: each is the level at which its own difference would be reported, with
    the chance of any false report at most that. Source: Holm 1979."""
    out, worst = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        worst = max(worst, min(1.0, (len(p) - rank) * p[i]))
        out[i] = worst
    return out


def total_variation(a: Counts, b: Counts, seed: int = 0) -> tuple[float, float, float]:
    """The distance of two samples [c], and an interval that holds that of their laws with 95 % or more.

    Samples are further apart than their laws, by no more than the noise of both: so the lower end is that far below, by
    a quantile of the noise, which resampling gives. The distance of the laws is their largest difference on any set of
    cells; on that set the samples differ by no more than their distance, and chance moves that difference by no more
    than half of 1 / sqrt(size) of each: so the upper end is that far above.
    """
    dice, (m, n) = np.random.default_rng(seed), (int(a.sum()), int(b.sum()))
    p, q = a / m, b / n
    noise = dice.multinomial(m, p, RESAMPLES) / m - p - dice.multinomial(n, q, RESAMPLES) / n + q
    apart = float(abs(p - q).sum() / 2)
    low = apart - float(np.quantile(abs(noise).sum(-1) / 2, 1 - TAIL))
    return apart, max(0.0, low), min(1.0, apart + Z / 2 * (1 / m + 1 / n) ** 0.5)
