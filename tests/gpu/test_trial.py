"""The checks of the GPU trial pass with the CUDA operators, with any family of them from torch, and find a wrong
kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from swiftspec.backends.cuda import cuda
from swiftspec.backends.cuda.trial import TrialRequest, capture_graph, run_checks
from swiftspec.backends.cuda.trial_checks import (
    AttentionShape,
    LayerShape,
    ProjectionShape,
    TreeShape,
    TrialDevice,
    TrialPlan,
    trial_checks,
)
from swiftspec.backends.families import FAMILIES, Family, compose
from swiftspec.backends.unfused import unfused
from swiftspec.builder import gpu_trial
from swiftspec.builder.gpu_trial import TrialLimits
from tests.gpu.device import DEVICE, EMULATED, most, needs_kernels, real
from tests.support.fake_cuda_graphs import Rerun

pytestmark = [pytest.mark.gpu, needs_kernels]
HIDDEN, INNER, VOCAB, CAPACITY = (64, 96, 136, 140) if EMULATED else (4096, 14336, 128_256, 6000)
GROUP = 32 if EMULATED else 128


def layer(cache: str, head_norms: bool) -> LayerShape:
    heads, kv_heads, dim = (2, 1, 64) if EMULATED else (32, 8, 128)
    return LayerShape(
        ProjectionShape("qkv", (heads + 2 * kv_heads) * dim, HIDDEN, GROUP),
        ProjectionShape("o", HIDDEN, heads * dim, GROUP),
        ProjectionShape("gate_up", 2 * INNER, HIDDEN, 0),
        ProjectionShape("down", HIDDEN, INNER, GROUP),
        AttentionShape(heads, kv_heads, dim, CAPACITY, cache, head_norms),
    )


PLAN = TrialPlan(
    (layer("bfloat16", True), layer("float8_e4m3fn", False)), (ProjectionShape("head", VOCAB, HIDDEN, GROUP),),
    TreeShape(40, 8, 8), 4,
)  # fmt: skip
NAMES = [check.name for check in trial_checks(PLAN)]
FAMILY_CASES: list[Family | None] = most([None, *FAMILIES], 3, 1)


class Device(TrialDevice):
    def finish(self) -> None:
        torch.cuda.synchronize()


AT = Device(DEVICE, Rerun() if EMULATED else capture_graph)


def reasons(ops: Any) -> dict[str, str]:
    lines = [*run_checks(TrialRequest(PLAN, str(DEVICE), True, [], NAMES), ops, AT)]
    return {str(line["check"]): why for line in lines if (why := line.get("reason")) is not None}


@pytest.mark.parametrize("family", FAMILY_CASES)
def test_the_operators_pass(family: Family | None) -> None:
    assert reasons(compose(cuda, unfused, () if family is None else [family])) == {}


def test_a_wrong_kernel_fails() -> None:
    def attention(qkv: Tensor, *of: Any) -> Tensor:
        return cuda.tree_attention(qkv, *of) * 1.1

    failed = reasons(cuda.with_operators(tree_attention=attention))
    assert {str(layer.attention) for layer in PLAN.layers} <= {*failed}
    assert {check.family for check in trial_checks(PLAN) if check.name in failed} <= {"attention", None}


@real
def test_a_trial_of_this_gpu() -> None:
    verdict, problem = gpu_trial.run_trial(PLAN, "cuda:0", limits=TrialLimits(tune_s=0.5))
    assert (verdict.fallbacks, problem) == ({}, None)
