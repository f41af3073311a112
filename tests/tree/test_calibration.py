"""The fitted constant: each step is Newton's, many of them lead to the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest

from swiftspec.tree.calibration import LEAST, MOST, PRIOR, STEP, Fit


def law(scores: np.ndarray, constant: float) -> np.ndarray:
    """log_softmax(scores / constant)."""
    scaled = scores / constant
    return scaled - np.logaddexp.reduce(scaled)


def test_a_step_is_newtons() -> None:
    """Where all tokens are children: by the difference quotients of the likelihood itself, and of its expectation."""
    scores, near = np.random.default_rng(0).normal(size=6), 1e-4
    for taken in range(6):
        fit = Fit(0.8)
        fit.see(law(scores, 0.8), taken)
        low, here, high = (law(scores, 0.8 * math.exp(by)) for by in (-near, 0.0, near))
        slope = (high[taken] - low[taken]) / (2 * near)
        information = -np.exp(here) @ (high - 2 * here + low) / near**2
        wanted = max(-STEP, min(slope / (PRIOR + information), STEP))
        assert math.log(fit.constant / 0.8) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("truth", [0.4, 1.0, 1.7])
@pytest.mark.parametrize("start", [0.2, 2.0])
def test_many_steps_find_the_truth(truth: float, start: float) -> None:
    """With eight children of a hundred tokens, so that many a token is none of them."""
    dice, fit, missed = np.random.default_rng(1), Fit(start), 0
    for _ in range(600):
        scores = 2 * dice.normal(size=100)
        taken = dice.choice(100, p=np.exp(law(scores, truth)))
        children = np.argsort(-scores)[:8]
        missed += taken not in children
        rank = int(np.flatnonzero(children == taken)[0]) if taken in children else None
        fit.see(law(scores, fit.constant)[children], rank)
    assert fit.constant == pytest.approx(truth, rel=0.15)
    assert missed > 5


def test_what_cannot_tell_moves_little_or_nothing() -> None:
    fit = Fit(1.0)
    fit.see(np.array([-math.inf, -math.inf]), None)
    fit.see(np.log([0.25, 0.25]), 0)  # alike: no constant makes one of them likelier
    assert fit.constant == 1.0
    fit.see(np.array([math.log(0.9), math.log(0.05), -math.inf]), 2)  # a token that the draft's filters forbid
    assert 1.0 < fit.constant < 1.5
    for rank, bound in ((0, LEAST), (None, MOST)):
        for _ in range(4000):
            fit.see(np.log([0.6, 0.1]), rank)
        assert fit.constant == bound
