"""Resampling in one launch equals the reference and the operator of the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cpu import sampling as cpu_sampling
from swiftspec.backends.cuda import sampling as cuda_sampling
from tests.gpu.device import DEVICE, EMULATED, captured, most, needs_kernels
from tests.support.resampling import ALWAYS, assert_agreement, check_by_enumeration, checked, groups_of, on

pytestmark = [pytest.mark.gpu, needs_kernels]


def weights_of(groups: int, count: int) -> tuple[Tensor, Tensor]:
    """Random weights; one group is uniform, one has all weight on one particle, one contains NaN."""
    dice = torch.Generator().manual_seed(count)
    weights = 2 * torch.randn(groups, count, dtype=torch.float64, generator=dice)
    weights[0] = 0
    weights[1, 1:] = -torch.inf
    weights[2, count // 2] = torch.nan
    return weights, torch.rand(groups, dtype=torch.float64, generator=dice)


@pytest.mark.parametrize(
    ("count", "slots", "width", "words"),
    most([(4, 24, 24, 11), (33, 30, 13, 9), (1, 8, 8, 8), (16, 1024, 512, 300), (300, 64, 40, 20), (1024, 16, 16, 9)],
         4, 2),
)  # fmt: skip
@pytest.mark.parametrize("threshold", [0.5, ALWAYS])
def test_as_the_reference_and_the_host(count: int, slots: int, width: int, words: int, threshold: float) -> None:
    """Rows are bitwise identical; so are log_z and ess if exp and log are the same, as on the emulated GPU."""
    weights, uniform = weights_of(5, count)
    groups = groups_of(weights, slots, words, 1)
    found, host = checked(cuda_sampling.resample, groups, uniform, threshold, width, DEVICE.type), on("cpu", groups)
    cpu_sampling.resample(host, uniform, threshold, width)
    assert_agreement(found, host, bits=EMULATED)


@pytest.mark.parametrize(("count", "parts"), most([(3, 3), (4, 4), (2, 9), (5, 6)], 2, 1))
def test_every_distribution_of_the_weights(count: int, parts: int) -> None:
    check_by_enumeration(cuda_sampling.resample, count, parts, DEVICE.type)


def test_resampling_can_be_captured() -> None:
    weights, uniform = weights_of(4, 8)
    groups = groups_of(weights, 32, 12, 2)
    ours, numbers = on(DEVICE, groups), uniform.to(DEVICE)

    def put_back() -> None:
        for name, tensor in groups.fields().items():
            getattr(ours, name).copy_(tensor)

    def work() -> Tensor:
        cuda_sampling.resample(ours, numbers, 0.7, 32)
        return ours.log_weights

    replay = captured(work)
    put_back()
    replay()
    wanted = on(DEVICE, groups)
    cuda_sampling.resample(wanted, numbers, 0.7, 32)
    assert_agreement(ours, wanted, bits=True)


def test_invalid_arguments_are_rejected() -> None:
    groups, uniform = on(DEVICE, groups_of(torch.zeros(2, 3), 8, 9, 1)), torch.full((2,), 0.5, dtype=torch.float64)
    named = {**groups.fields(), "uniform": uniform.to(DEVICE), "threshold": 0.5, "width": 8, "stream": 0}
    for name, value, message in (
        ("width", 9, "the window is wider"),
        ("uniform", uniform.to(DEVICE)[:1], "uniform: expected"),
        ("mask", groups.mask[:, :2], "mask: expected"),
        ("log_weights", torch.zeros(2, 1025, dtype=torch.float64, device=DEVICE), "between 1 and 1024 particles"),
    ):
        with pytest.raises(ValueError, match=message):
            _C.resample_cuda(**{**named, name: value})
