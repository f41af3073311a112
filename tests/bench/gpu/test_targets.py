"""Latency targets on a GPU: the published ones with assumed constants, and how measured constants change them."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from bench.baselines.kernels import BaselineKernels
from bench.gpu import targets
from bench.gpu.cases import Maker
from bench.gpu.targets import ASSUMED, Constants

MAKE = Maker("cpu", BaselineKernels())


def test_targets_are_the_published_table() -> None:
    """Those of a 70B over four ranks at 8 rows, assuming an H200; a slower card has higher ones."""
    want = {"qkv": (7.0, 5.5), "o": (6.3, 4.9), "swiglu": (22.7, 19.1), "down": (13.1, 10.8)}
    for op, (accept, goal) in want.items():
        moved = MAKE.linear("Llama-3-70B", 4, op, 8).moved
        target = targets.linear(moved, ASSUMED)
        assert target.accept == pytest.approx(accept, abs=0.1) and target.goal == pytest.approx(goal, abs=0.1)
        assert targets.linear(moved, Constants.of(None, 3000.0)).accept > target.accept
    moved = MAKE.attention("Llama-3-8B", 1, 1000, 8).moved
    assert targets.attention(moved, ASSUMED).accept <= 6.5
    moved = MAKE.attention("Llama-3-70B", 4, 1000, 8).moved
    assert targets.attention(moved, ASSUMED).accept == pytest.approx(5.4, abs=0.1)
    for rows, accept in ((8, 6.0), (64, 14.0)):
        assert targets.sampling(4 * rows * 128256, ASSUMED).accept == pytest.approx(accept, abs=0.1)
    for shape, (_, step) in targets.STEPS.items():
        assert asdict(targets.step(shape, ASSUMED) or step) == pytest.approx(asdict(step))


def test_measured_constants_move_the_targets() -> None:
    """Each in the right direction, and by no more than the change of the constant."""
    moved, base = 61_370_000, targets.linear(61_370_000, ASSUMED)
    slow = targets.linear(moved, replace(ASSUMED, gap=1.85))
    assert slow.accept == pytest.approx(base.accept + 1) and slow.goal == pytest.approx(base.goal + 1)
    assert targets.linear(moved, replace(ASSUMED, read=4730.0)).accept < base.accept
    assert targets.linear(moved, replace(ASSUMED, exchange=9.0)) == base
    measured = targets.step("Llama-3-70B", replace(ASSUMED, gap=0.35))
    then = targets.step("Llama-3-70B", ASSUMED)
    assert measured is not None and then is not None
    assert then.accept - measured.accept == pytest.approx(80 * 5 * 0.5e-3)
    found = {"constants": {"gap": 1.0, "copy": 9999.0}}
    on = Constants.of(found, 3000.0)
    assert (on.copy, on.gap, on.read, on.latency) == (3000.0, 1.0, 3000.0, ASSUMED.latency)
