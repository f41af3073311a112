"""Resampling: the CPU operator equals the reference, and the distribution of both is checked by enumeration."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swiftspec import _C
from swiftspec.backends.cpu import sampling as cpu_sampling
from swiftspec.backends.reference import resampling
from tests.support.resampling import ALWAYS, check_by_enumeration, checked, groups_of


@pytest.mark.parametrize("operator", [resampling.resample, cpu_sampling.resample], ids=["reference", "host"])
@pytest.mark.parametrize(("count", "parts"), [(1, 3), (2, 7), (3, 5), (4, 4)])
def test_every_distribution_of_the_weights(operator: Any, count: int, parts: int) -> None:
    check_by_enumeration(operator, count, parts, "cpu")


@pytest.mark.parametrize("threshold", [0.0, 0.5, ALWAYS])
@pytest.mark.parametrize("count", [1, 4, 33])
def test_the_cpu_operator_equals_the_reference(count: int, threshold: float) -> None:
    dice = torch.Generator().manual_seed(count)
    weights = 2 * torch.randn(40, count, dtype=torch.float64, generator=dice)
    weights[0] = 0
    weights[1, 1:] = -torch.inf
    weights[2, 0] = torch.nan
    uniform = torch.rand(40, dtype=torch.float64, generator=dice)
    for slots, width in ((24, 24), (30, 13)):
        found = checked(cpu_sampling.resample, groups_of(weights, slots, 11, slots), uniform, threshold, width, "cpu")
        assert bool(found.ess[2].isnan()), "a NaN weight affects its own group only"


def test_invalid_arguments_are_refused() -> None:
    groups, uniform = groups_of(torch.zeros(2, 3), 8, 9, 1), torch.full((2,), 0.5, dtype=torch.float64)
    named: dict[str, Any] = {**groups.fields(), "uniform": uniform, "threshold": 0.5, "width": 8}
    for name, value, message in (
        ("width", 9, "the window is wider"),
        ("uniform", uniform[:1], "uniform: expected"),
        ("mask", groups.mask[:, :2], "mask: expected"),
        ("ends", groups.ends.byte(), "ends: expected"),
        ("path", groups.path[..., :3].contiguous(), "a path its header"),
        ("path", torch.full_like(groups.path, 3), "more tokens than its capacity"),
    ):
        with pytest.raises(ValueError, match=message):
            _C.resample(**{**named, name: value})
