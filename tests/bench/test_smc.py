"""How bench/smc.py evaluates its results: distances, table and figure."""

from __future__ import annotations

import math

import pytest

from bench.smc import Result, distance

PLAIN = Result(0, 0, tokens=100, rounds=100, seconds=1.0, likelihood=[-1.0, -2.0, -1.5])
WORSE = Result(1, 4, tokens=200, rounds=40, seconds=1.0, likelihood=[-1.5, -2.5, -2.0])
BETTER = Result(8, 4, tokens=30, rounds=6, seconds=1.0, likelihood=[-0.9, -1.6, -1.6])


def test_a_distance_is_paired() -> None:
    assert distance(WORSE, PLAIN) == (pytest.approx(-0.5), pytest.approx(0))
    mean, error = distance(BETTER, PLAIN)
    assert mean == pytest.approx((0.1 + 0.4 - 0.1) / 3)
    assert error == pytest.approx(math.sqrt((0.1**2 + 0.4**2 + 0.1**2 - 3 * mean**2) / 2 / 3))
