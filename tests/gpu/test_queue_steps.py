"""The tuner, and steps of tools/gpu_queue.py, with the CUDA operators on small shapes."""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.baselines.kernels import BaselineKernels
from bench.gpu import cases, chain, footprint, shapes, tilings
from bench.gpu.cases import OURS, PAIRED, Case, Maker
from bench.gpu.tuning import UNTUNED, with_tuning
from swiftspec.backends.cuda import cuda
from swiftspec.backends.cuda.trial import capture_graph
from swiftspec.backends.cuda.trial_checks import AttentionShape, LayerShape, ProjectionShape, TrialDevice, TrialPlan
from swiftspec.backends.cuda.tuner import EACH_VARIANT, Tuning, TuningBench
from tests.gpu.device import DEVICE, EMULATED, needs_kernels
from tests.support.fake_cuda_graphs import Rerun

pytestmark = [pytest.mark.gpu, needs_kernels]
PLAN = TrialPlan(
    (LayerShape(
        ProjectionShape("qkv", 256, 256, 32), ProjectionShape("o", 256, 128, 32),
        ProjectionShape("gate_up", 512, 256, 128), ProjectionShape("down", 256, 256, 128),
        AttentionShape(2, 1, 64, 140, "bfloat16", False),
    ),),
    (), None, 0,
)  # fmt: skip
COLD_BYTES = 1 << 17  # several copies of each matrix


class Device(TrialDevice):
    def finish(self) -> None:
        torch.cuda.synchronize()


AT = Device(DEVICE, Rerun() if EMULATED else capture_graph)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model, and the CUDA operators also where the device is the emulated one."""
    monkeypatch.setitem(shapes.MODELS, "small", (256, 4, 2, 64, 512, 512))
    monkeypatch.setitem(shapes.LAYERS, "small", 5)
    monkeypatch.setattr(shapes, "GB", 1e5)
    monkeypatch.setattr(cases, "operators", lambda device: {cases.OURS: cuda, "unfused": None})


def later_is_faster() -> Callable[[Sequence[Callable[[], Tensor]]], float]:
    """A timer that runs the calls, and that prefers what it sees last."""
    seconds = [1.0]

    def timer(calls: Sequence[Callable[[], Tensor]]) -> float:
        for call in calls:
            call()
        AT.finish()
        seconds[0] *= 0.9
        return seconds[0]

    return timer


def bench() -> TuningBench:
    return TuningBench(cuda, AT, later_is_faster(), COLD_BYTES, lambda: 0.0)


def test_what_the_tuner_finds_is_used() -> None:
    """Layers with other tilings and another kernel of attention than the default ones pass the checks."""
    with torch.inference_mode():
        found = bench().tune(PLAN)
        assert len(found.tilings) == 4 and Tuning.from_json(found.to_json()) == found
        assert len(found.kernel_shapes) == (len(cuda.attention_shapes(140)) > 1)
        ops = with_tuning(cuda, found)
        for shape in PLAN.layers[0].projections:
            weight = cases.random_int4(shape.outputs, shape.inputs, shape.group, str(DEVICE))
            default, tuned = (each.pack(weight, torch.bfloat16, DEVICE) for each in (cuda, ops))
            chosen = found.tilings[default.shape_name]
            assert tuned.native.row == chosen != default.native.row


def test_every_tiling_of_a_shape_is_timed() -> None:
    with torch.inference_mode():
        found = tilings.timed(bench(), PLAN.layers[0].qkv, EACH_VARIANT)
    assert {row["tiling"][0] for row in found} >= {"ring", "direct"}
    assert all(8 in row["us"] for row in found)
    sums = tilings.summary({"qkv": found})
    assert sums["fastest us"] <= sums["ring us"] <= sums["default us"]


def test_a_chain_runs_with_each_operator_left_out() -> None:
    arguments = Namespace(device=DEVICE.type, rows=8, context=40, leave_out=True)
    with torch.inference_mode():
        found: list[dict[str, Any]] = [*chain.measure("small", arguments, UNTUNED)]
    assert [row["without"] for row in found] == [None, None, *chain.OPERATORS, chain.APPEND]
    assert chain.summary(found)["small"].keys() == {"few", "all", *chain.OPERATORS, chain.APPEND}


def test_all_kernels_of_the_queue_run() -> None:
    make = Maker(DEVICE.type, BaselineKernels(), cold=1)
    several: list[Case] = [
        *(make.linear("small", 1, op, rows) for op in ("qkv", "o", "swiglu", "down", "head") for rows in (1, 8, 16)),
        make.attention("small", 1, 40, 8), make.particles("small", 1, 2), make.resampling(8),
        *(make.sampling("small", op, 8) for op in ("draw", "children")),
    ]  # fmt: skip
    ran = 0
    with torch.inference_mode():
        for case, name in itertools.product(several, (OURS, PAIRED)):
            if name in case.variants:
                for call in case.variants[name]()[:2]:
                    call()
                    ran += 1
        AT.finish()
    assert ran == 2 * (len(several) + 2), "two forms of attention"


def test_working_sets_grow() -> None:
    arguments = Namespace(model="small", device=DEVICE.type, sizes=[0.25, 8.0], touch=False)
    with torch.inference_mode():
        found = [*footprint.measure("o", arguments)]
    assert [point["sets"] for point in found] == [1, 23] and footprint.by_size(found)["o"].keys() == {"0.25", "8"}
