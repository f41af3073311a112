"""Two-sample tests on categorical data: chi-square test, Holm correction, total variation distance.

A cell is a category, or all rare categories together. A sample is represented by its counts, an array [c] with the
number of observations in each of the c cells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

MIN_CELL_COUNT = 10  # cells with fewer observations in both samples together are merged into one cell
RESAMPLES = 1000  # pairs of samples that estimate the noise of a total variation distance
TAIL, Z = 0.025, 1.96  # probability on each side of a confidence interval, and its normal quantile
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of two samples of one quantity.

    `square`: chi-square statistic.
    `p`: probability of a statistic at least this large if both samples have the same distribution.
    """

    name: str
    cells: int
    square: float
    p: float
    apart: float  # total variation distance of the two samples
    low: float  # lower end of the 95 % confidence interval of the distance of the two distributions
    high: float  # its upper end


def compare(name: str, first: Sequence[Hashable], second: Sequence[Hashable], seed: int = 0) -> Comparison:
    """Compares two samples, which may differ in size. `seed`: of the resampling for the confidence interval."""
    a, b = pooled(first, second)
    square, p = chi_square(a, b)
    apart, low, high = total_variation(a, b, seed)
    return Comparison(name, len(a), square, p, apart, low, high)


def pooled(first: Sequence[Hashable], second: Sequence[Hashable]) -> tuple[Counts, Counts]:
    """Returns the counts [c] of both samples over the same cells. The last cell has all values with fewer than
    MIN_CELL_COUNT observations in both samples together, if there are any."""
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
    """Returns the chi-square statistic of homogeneity of the counts `a` and `b` [c], and its p-value at c - 1 degrees
    of freedom.

    Returns (0, 1) if there are fewer than two cells.
    """
    if len(a) < 2:
        return 0.0, 1.0
    ratio = (b.sum() / a.sum()) ** 0.5
    square = float(((a * ratio - b / ratio) ** 2 / (a + b)).sum())
    return square, survival(square, len(a) - 1)


def survival(square: float, freedom: int) -> float:
    """Returns the probability that a chi-square variable with `freedom` degrees of freedom exceeds `square`."""
    half = torch.tensor([freedom / 2, square / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def holm(p: Sequence[float]) -> list[float]:
    """Returns p-values after Holm-Bonferroni correction, in the given order.

    A corrected p-value is the smallest family-wise error rate at which its test rejects. Source: Holm 1979.
    """
    out, worst = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        worst = max(worst, min(1.0, (len(p) - rank) * p[i]))
        out[i] = worst
    return out


def total_variation(a: Counts, b: Counts, seed: int = 0) -> tuple[float, float, float]:
    """Returns (distance, low, high): the total variation distance of the counts `a` and `b` [c], and a confidence
    interval of at least 95 % for the distance of the distributions that the samples were drawn from.

    Low: the distance of the counts exceeds that of the distributions by at most their sampling noise, so low is the
    distance minus the 97.5 % quantile of the noise, estimated by resampling with `seed`.
    High: the distance of the distributions is the largest difference in probability of any set of cells. The counts
    differ on the set that attains it by at most their distance. The standard deviation of their difference is at most
    `sqrt(1 / m + 1 / n) / 2` for samples of m and n observations, so high is the distance plus 1.96 times that.
    """
    dice, (m, n) = np.random.default_rng(seed), (int(a.sum()), int(b.sum()))
    p, q = a / m, b / n
    noise = dice.multinomial(m, p, RESAMPLES) / m - p - dice.multinomial(n, q, RESAMPLES) / n + q
    apart = float(abs(p - q).sum() / 2)
    low = apart - float(np.quantile(abs(noise).sum(-1) / 2, 1 - TAIL))
    return apart, max(0.0, low), min(1.0, apart + Z / 2 * (1 / m + 1 / n) ** 0.5)
