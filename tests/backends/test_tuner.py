"""The tuner, with torch's operators, a timer that knows the cost of each tiling and kernel shape, and its clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from swiftspec.backends.cuda import trial, tuner
from swiftspec.backends.cuda.attention import heads_name
from swiftspec.backends.cuda.linear import ProjectionTiling, shape_name
from swiftspec.backends.cuda.trial import TUNING, TrialRequest, run_checks
from swiftspec.backends.cuda.trial_checks import AttentionShape, LayerShape, ProjectionShape, TrialDevice, TrialPlan
from swiftspec.backends.cuda.tuner import Tuning, TuningBench
from swiftspec.backends.unfused import UnfusedBackend, unfused
from tests.support.fake_cuda_graphs import Rerun

LAYER = LayerShape(
    ProjectionShape("qkv", 256, 64, 32), ProjectionShape("o", 64, 128, 32), ProjectionShape("gate_up", 192, 64, 32),
    ProjectionShape("down", 64, 96, 32), AttentionShape(2, 1, 64, 300, "bfloat16", False),
)  # fmt: skip
PLAN = TrialPlan((LAYER,), (ProjectionShape("head", 304, 64, 0), ProjectionShape("head", 256, 64, 32)), None, 0)
Choice = ProjectionTiling | str
QKV, HEAD = "64 x 256 int4/32", "64 x 304 bf16"
SHAPES = {QKV, HEAD, "128 x 64 int4/32", "64 x 192 int4/32", "96 x 64 int4/32"}
DEFAULT, DIRECT, SPLIT = (
    ProjectionTiling("ring", 4, 8, 1, 2), ProjectionTiling("direct", 1, 8, 1, 1), ProjectionTiling("ring", 2, 4, 2, 1)
)  # fmt: skip


@dataclass(frozen=True)
class TunedMatrix:
    """A matrix of torch's operators with a tiling."""

    inner: Any
    shape_name: str
    tiling: ProjectionTiling
    tiles: Tensor = field(default_factory=lambda: torch.zeros(100, dtype=torch.uint8))


class TunedBackend(UnfusedBackend):
    """Packs matrices with `tilings`, and prepares attention with `kernel_shapes`."""

    TILINGS = True
    tilings: Mapping[str, ProjectionTiling] = MappingProxyType({})
    kernel_shapes: Mapping[str, str] = MappingProxyType({})

    def prepare(
        self, batch: Any, cache: Any, cos: Any, sin: Any, num_heads: int, options: Any = None, shape: str = ""
    ) -> Any:
        name = heads_name(num_heads, cache.k.shape[2], cache.k.shape[4], "short")
        chosen = self.kernel_shapes.get(name, "short")
        return unfused.prepare(batch, cache, cos, sin, num_heads), shape or chosen

    def pack(self, weight: Any, dtype: torch.dtype, device: Any) -> Any:
        outputs, inputs = weight.dequantize(dtype).shape
        name = shape_name(inputs, outputs, getattr(weight, "group_size", 0))
        return TunedMatrix(unfused.pack(weight, dtype, device), name, self.tilings.get(name, DEFAULT))


@dataclass
class TunedOperators:
    """torch's operators with tilings and shapes of attention. `costs`: seconds per row of x of a call, other than
    those of the defaults. `wrong`: with more rows than this, a tiling has other results, or a shape. `calls`: name of
    the weight's shape, tiling or shape of attention, and rows of each call."""

    costs: dict[Choice, float]
    wrong: dict[Choice, int] = field(default_factory=dict)
    calls: list[tuple[str, Choice, int]] = field(default_factory=list)
    now: float = 0.0

    def operators(self) -> Any:
        names = ("norm_linear", "norm_swiglu", "norm_head", "linear_residual")
        products = {name: self._product(getattr(unfused, name)) for name in names}
        return TunedBackend().with_operators(
            **products, tilings_of=self.tilings_of, with_tiling=self.with_tiling, tree_attention=self.attention,
            attention_shapes=lambda capacity: ["short", *(each for each in self.costs if isinstance(each, str))],
        )  # fmt: skip

    def tilings_of(self, packed: TunedMatrix, each: int) -> list[ProjectionTiling]:
        return [DEFAULT, *(each for each in self.costs if not isinstance(each, str))][: 1 + each]

    def with_tiling(self, packed: TunedMatrix, tiling: ProjectionTiling, tiles: Tensor | None = None) -> TunedMatrix:
        return replace(packed, tiling=tiling, tiles=packed.tiles if tiles is None else tiles)

    def attention(self, qkv: Tensor, plan: Any, layer: int, *norm: Any) -> Tensor:
        inner, shape = plan
        self.calls.append(("attention", shape, len(qkv)))
        out = unfused.tree_attention(qkv, inner, layer, *norm)
        return out * 1.2 if len(qkv) > self.wrong.get(shape, 1 << 20) else out

    def _product(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor, *others: Any) -> Tensor:
            [packed] = [each for each in others if isinstance(each, TunedMatrix)]
            self.calls.append((packed.shape_name, packed.tiling, len(x)))
            out = function(x, *(packed.inner if each is packed else each for each in others))
            return out * 1.2 if len(x) > self.wrong.get(packed.tiling, 1 << 20) else out

        return run

    def timer(self, calls: Sequence[Callable[[], Tensor]]) -> float:
        before, seconds = len(self.calls), 0.0
        for call in calls:
            call()
        for _, tiling, rows in self.calls[before:]:
            seconds += self.costs.get(tiling, 1e-5) * rows
        self.now += seconds
        return seconds


def tuning(of: TunedOperators, seconds: float = tuner.TUNE_S) -> Tuning:
    at = TrialDevice(torch.device("cpu"), Rerun())
    return TuningBench(of.operators(), at, of.timer, 350, lambda: of.now).tune(PLAN, seconds)


def tuned(of: TunedOperators) -> Mapping[str, ProjectionTiling]:
    return tuning(of).tilings


def test_the_fastest_tiling_of_each_shape_is_kept() -> None:
    of = TunedOperators({SPLIT: 0.9e-5, DIRECT: 0.8e-5})
    assert tuned(of) == dict.fromkeys(SHAPES, DIRECT)
    assert {rows for _, tiling, rows in of.calls if tiling == SPLIT} == set(tuner.ROWS)


@pytest.mark.parametrize(
    ("of", "found"),
    [
        (TunedOperators({SPLIT: 0.99e-5, DIRECT: 1.2e-5}), None),  # within the margin
        (TunedOperators({SPLIT: 0.9e-5, DIRECT: 0.8e-5}, wrong={DIRECT: 0}), SPLIT),  # differs from the default
        (TunedOperators({SPLIT: 0.9e-5, DIRECT: 0.8e-5}, wrong={DIRECT: 16}), SPLIT),  # fails the trial's check
        (TunedOperators({DIRECT: 0.8e-5}, wrong={DIRECT: 16}), None),
    ],
)
def test_slow_and_wrong_tilings_are_not_kept(of: TunedOperators, found: ProjectionTiling | None) -> None:
    assert tuned(of) == (dict.fromkeys(SHAPES, found) if found is not None else {})


@pytest.mark.parametrize(
    ("of", "found"),
    [
        (TunedOperators({"paired": 0.9e-5, "long": 0.8e-5}), "long"),
        (TunedOperators({"paired": 0.99e-5, "long": 1.2e-5}), None),  # within the margin
        (TunedOperators({"paired": 0.9e-5, "long": 0.8e-5}, wrong={"long": 0}), "paired"),  # differs from the default
        (TunedOperators({"paired": 0.9e-5, "long": 0.8e-5}, wrong={"long": 8}), "paired"),  # fails the trial's check
        (TunedOperators({}), None),  # a GPU without a choice
    ],
)
def test_the_fastest_shape_of_attention_is_kept(of: TunedOperators, found: str | None) -> None:
    kept = tuning(of)
    assert kept == Tuning(kernel_shapes={} if found is None else {"2/1 heads of 64, short": found})
    assert bool(kept) == (found is not None) and Tuning.from_json(kept.to_json()) == kept


def test_shapes_for_which_there_is_no_time_keep_the_default() -> None:
    of = TunedOperators({DIRECT: 0.8e-5})
    assert tuning(of, 1e-3).tilings == {"96 x 64 int4/32": DIRECT}, "the smallest comes first"


def test_layers_that_fail_lose_all_tilings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[set[Choice]]()

    def fails(shape: LayerShape, ops: Any, at: TrialDevice) -> str:
        of.calls.clear()
        tuner.check_repeats(shape, ops, at)
        seen.append({tiling for _, tiling, _ in of.calls})
        return "kernels in a row have other results than one by one"

    monkeypatch.setattr(tuner, "LAYER_CHECKS", (fails,))
    of = TunedOperators({DIRECT: 0.8e-5})
    assert tuning(of) == Tuning() and seen == [{DIRECT, "short"}]


def test_a_trial_ends_with_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without graphs nothing is timed; an operator that fails there is a reason, and no tilings."""
    of, request = TunedOperators({DIRECT: 0.8e-5}), TrialRequest(PLAN, "cuda:0", True, [], [TUNING])
    found = list[Any]()

    def lines(at: TrialDevice) -> Any:
        monkeypatch.setattr(
            trial, "TuningBench", lambda ops, at, *_, **named: TuningBench(ops, at, of.timer, 350, lambda: of.now)
        )
        monkeypatch.setattr(trial._C, "cuda_device", lambda: {"l2": 1}, raising=False)
        found[:] = run_checks(request, of.operators(), at)
        return found[1]

    graphs, tilings = TrialDevice(torch.device("cpu"), Rerun()), dict.fromkeys(SHAPES, DIRECT)
    assert lines(graphs) == {"check": TUNING, "reason": None, "tuning": Tuning(tilings).to_json()}
    assert found[0] == {"begins": TUNING}
    assert lines(TrialDevice(torch.device("cpu"))) == {"check": TUNING, "reason": None, "tuning": Tuning().to_json()}
    monkeypatch.setattr(of, "timer", lambda calls: 1 / 0)
    assert lines(graphs) == {"check": TUNING, "reason": "division by zero"}
