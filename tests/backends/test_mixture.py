"""Mixtures of experts: native ones at every ISA level match the reference, and their rows are independent; library ones
give the same result whether they gather experts or compute all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cpu import cpu as host
from swiftspec.backends.reference import reference
from swiftspec.backends.reference.mixture import choose_experts
from swiftspec.backends.unfused import mixture as library
from swiftspec.backends.unfused import unfused
from swiftspec.model.formats.blocks import BLOCK_TYPES, BlockWeight
from swiftspec.model.formats.int4 import Int4Weight
from swiftspec.model.formats.int8 import Int8Weight
from swiftspec.model.spec import Activation, ExpertsSpec, MlpSpec, SigmoidRouting
from swiftspec.model.weights import DenseWeight, LayerWeights, Weight
from tests.backends.test_unfused import NoHost
from tests.support.gguf_files import random_blocks

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
HIDDEN, INNER, EXPERTS, ROWS = 128, 96, 7, 21
SHARED = 160  # intermediate size of the shared expert
native = pytest.mark.skipif(_C.level() == "none", reason="this CPU has no AVX2")


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def dense(outputs: int, inputs: int, seed: int) -> Weight:
    return DenseWeight(random(outputs, inputs, seed=seed, scale=inputs**-0.5).to(BF16))


def int4(outputs: int, inputs: int, seed: int) -> Weight:
    """One matrix for each expert, as a checkpoint has them."""
    count = EXPERTS if outputs % (8 * EXPERTS) == 0 else 1
    first, *rest = (
        Int4Weight.of(random(outputs // count, inputs, seed=seed + i, scale=inputs**-0.5), 32) for i in range(count)
    )
    return first.stack(rest, None)


def int4_rounded(outputs: int, inputs: int, seed: int) -> Weight:
    weight = int4(outputs, inputs, seed)
    assert isinstance(weight, Int4Weight)
    return replace(weight, int8_activations=1)


def int8(outputs: int, inputs: int, seed: int) -> Weight:
    weight = Int8Weight.of(random(outputs, inputs, seed=seed, scale=inputs**-0.5))
    assert weight is not None
    return weight


def blocks(outputs: int, inputs: int, seed: int) -> Weight:
    kind = BLOCK_TYPES["Q4_1"]
    rows = random_blocks(kind, outputs, inputs, np.random.default_rng(seed))
    return BlockWeight(torch.from_numpy(rows), kind)


FORMATS: dict[str, Callable[[int, int, int], Weight]] = {
    "dense": dense, "int4": int4, "int4 with int8 activations": int4_rounded, "int8": int8, "Q4_1": blocks,
}  # fmt: skip


class Mixture:
    """A mixture of experts and a norm, packed for several backends. `biased`: router and experts have biases."""

    def __init__(
        self, make: Callable[[int, int, int], Weight], *, chosen: int = 3, norm_topk_prob: bool = True,
        activation: Activation = "silu", biased: bool = False, shared: int = 0, count: int = EXPERTS,
        sigmoid: SigmoidRouting | None = None,
    ) -> None:  # fmt: skip
        experts = ExpertsSpec(count, chosen, norm_topk_prob, shared, sigmoid=sigmoid)
        self.spec = MlpSpec(INNER, bias=biased, activation=activation, experts=experts)
        gate_up, down = make(count * 2 * INNER, HIDDEN, 1), make(count * HIDDEN, INNER, 2)
        matrices: list[Any] = [gate_up, down, dense(experts.router_rows, HIDDEN, 3)]
        if biased:
            matrices = [
                replace(matrix, bias=random(matrix.shape[0], seed=6 + i).to(BF16)) for i, matrix in enumerate(matrices)
            ]
        gate_up, down, router = matrices
        unused: Any = None
        self.weights = LayerWeights(
            unused, unused, unused, None, gate_up, down, router=router,
            shared_gate_up=make(2 * shared, HIDDEN, 6) if shared else None,
            shared_down=make(HIDDEN, shared, 7) if shared else None,
            correction=random(count, seed=8, scale=0.3) if sigmoid is not None else None,
        )  # fmt: skip

    def packed(self, ops: Any, dtype: torch.dtype) -> tuple[Any, Any]:
        scale = random(HIDDEN, seed=4).to(BF16) + 1
        return ops.pack_norm(scale, 1e-5, dtype, "cpu"), ops.pack_mixture(self.weights, self.spec, dtype, "cpu")


def rows_of(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, residual = random(2, ROWS, HIDDEN, seed=5, scale=3.0).to(BF16).to(dtype)
    return x, residual


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.sampled(3)
@native
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shared", [0, SHARED])
def test_native_mixtures(level: str, kind: str, activation: Activation, dtype: torch.dtype, shared: int) -> None:
    """Close to the reference; a row is bitwise identical in batches of any size. Clamped SwiGLU with biases."""
    biased = activation == "clamped_swiglu" and not shared
    mixture = Mixture(FORMATS[kind], activation=activation, biased=biased, shared=shared)
    x, residual = rows_of(dtype)
    norm, packed = mixture.packed(host, dtype)
    alone = torch.cat([host.mlp(x[r : r + 1], norm, packed, residual[r : r + 1]) for r in range(ROWS)])
    for count in (1, 2, 5, 8, 13, ROWS):
        part = slice(ROWS - count, ROWS)
        assert torch.equal(host.mlp(x[part], norm, packed, residual[part]), alone[part])
    wide = F64 if dtype == F32 and kind in ("dense", "int4", "Q4_1") else dtype
    exact_norm, exact = mixture.packed(reference, wide)
    want = reference.mlp(x.to(wide), exact_norm, exact, residual.to(wide))
    assert error(alone, want) < (1.2e-2 if dtype == BF16 else 2e-6)
    doubled = host.mlp(x, norm, packed, residual, lambda product: product * 2, None, 0.5)
    assert error(doubled, want) < (1.2e-2 if dtype == BF16 else 2e-6)


@native
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_gates_beyond_the_limits(level: str, dtype: torch.dtype) -> None:
    """Of clamped SwiGLU. NaN stays NaN."""
    weight, x = dense(2 * INNER, HIDDEN, 1), random(5, HIDDEN, seed=5, scale=8.0).to(dtype)
    x[3] = torch.nan
    ours = host.norm_swiglu(x, None, host.pack(weight, dtype, "cpu"), "clamped_swiglu")
    want = reference.norm_swiglu(x.double(), None, reference.pack(weight, F64, "cpu"), "clamped_swiglu")
    assert ours[3].isnan().all() and (want.abs() > 55).any(), "both limits together give 56"
    finite = [0, 1, 2, 4]
    assert error(ours[finite], want[finite]) < (1e-2 if dtype == BF16 else 1e-6)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = host.threads()
    host.set_threads(2)
    yield
    host.set_threads(before)


@native
def test_threads_do_not_change_a_bit(two_threads: None) -> None:
    for shared in (0, SHARED):
        host.set_threads(2)
        mixture, (x, residual) = Mixture(int4_rounded, shared=shared), rows_of(BF16)
        norm, packed = mixture.packed(host, BF16)
        want = host.mlp(x, norm, packed, residual)
        host.set_threads(1)
        assert torch.equal(host.mlp(x, norm, packed, residual), want)


@native
@pytest.mark.parametrize("chosen", [1, 2, EXPERTS])
@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("shared", [0, 8, 40])
def test_the_weights_of_experts(chosen: int, norm_topk_prob: bool, shared: int) -> None:
    """The sizes of the shared expert are not multiples of 16."""
    mixture, (x, residual) = (
        Mixture(dense, chosen=chosen, norm_topk_prob=norm_topk_prob, activation="gelu_tanh", shared=shared),
        rows_of(F32),
    )
    norm, packed = mixture.packed(host, F32)
    exact_norm, exact = mixture.packed(reference, F64)
    want = reference.mlp(x.double(), exact_norm, exact, residual.double())
    assert error(host.mlp(x, norm, packed, residual), want) < 2e-6
    for ops in (reference, unfused):
        own_norm, own = mixture.packed(ops, F64)
        assert error(ops.mlp(x.double(), own_norm, own, residual.double()), want) < 1e-12


@native
@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize(
    "sigmoid", [SigmoidRouting(), SigmoidRouting(4, 2, 2.5), SigmoidRouting(3, 1, 0.5), SigmoidRouting(12, 12)], ids=str
)
def test_experts_chosen_by_sigmoid_scores(sigmoid: SigmoidRouting, norm_topk_prob: bool) -> None:
    mixture, (x, residual) = (
        Mixture(dense, count=12, norm_topk_prob=norm_topk_prob, sigmoid=sigmoid, shared=40),
        rows_of(F32),
    )
    norm, packed = mixture.packed(host, F32)
    exact_norm, exact = mixture.packed(reference, F64)
    want = reference.mlp(x.double(), exact_norm, exact, residual.double())
    ours = host.mlp(x, norm, packed, residual)
    assert error(ours, want) < 2e-6
    assert torch.equal(host.mlp(x[3:4], norm, packed, residual[3:4]), ours[3:4])
    own_norm, own = mixture.packed(unfused, F64)
    with NoHost():
        theirs = unfused.mlp(x.double(), own_norm, own, residual.double())
    assert error(theirs, want) < 1e-12
    experts, weights = choose_experts(exact.router(x), exact.experts, exact.correction)
    groups = {tuple({*row}) for row in (experts // (12 // sigmoid.groups)).tolist()}
    assert all(len(used) <= sigmoid.groups_per_token for used in groups) and len(groups) > (sigmoid.groups > 1)
    assert norm_topk_prob == weights.sum(1).allclose(torch.tensor(sigmoid.multiplier).double(), rtol=1e-12)


@native
def test_groups_that_do_not_fit_are_refused() -> None:
    x, residual = rows_of(F32)
    for sigmoid, message in (
        (SigmoidRouting(5), "groups must divide the experts"),
        (SigmoidRouting(4, 5), "at least one group, and at most all"),
        (SigmoidRouting(12, 3), "a group needs at least two experts"),
        (SigmoidRouting(6, 1), "groups of a row have too few experts"),
    ):
        packed = Mixture(dense, count=12, sigmoid=sigmoid).packed(host, F32)[1]
        with pytest.raises(ValueError, match=message):
            host.mlp(x, None, packed, residual)


@pytest.mark.parametrize("ops", [reference, unfused, *([] if _C.level() == "none" else [host])])
def test_a_shared_expert_is_a_dense_mlp_times_its_gate(ops: Any) -> None:
    """The output without experts is that of the shared expert; a gate of 0 or 1 removes or keeps it."""
    dtype = F32 if ops is host else F64
    mixture, (x, residual) = Mixture(dense, shared=SHARED), rows_of(dtype)
    weights, found = mixture.weights, list[Tensor]()
    assert isinstance(weights.down, DenseWeight) and isinstance(weights.router, DenseWeight)
    mixture.weights = replace(weights, down=DenseWeight(torch.zeros_like(weights.down.weight)))
    x = x.abs()  # the sign of the weights of the gate is that of its logit
    for gate in (-1e3, 0.0, 1e3):
        weights.router.weight[-1] = gate
        found.append(ops.mlp(x, None, mixture.packed(ops, dtype)[1], residual) - residual)
    assert weights.shared_gate_up is not None and weights.shared_down is not None
    gate_up, down = (weight.dequantize(F64) for weight in (weights.shared_gate_up, weights.shared_down))
    first, second = (x.double() @ gate_up.T).chunk(2, 1)
    want = (torch.nn.functional.silu(first) * second) @ down.T
    assert found[0].abs().max() == 0
    assert error(found[1], want / 2) < 1e-6 and error(found[2], want) < 1e-6


@native
def test_projections_that_do_not_fit_are_refused() -> None:
    mixture, (x, residual) = Mixture(dense, shared=SHARED), rows_of(F32)
    for changed, message in (
        ({"shared_down": dense(HIDDEN, SHARED + 8, 1)}, "projections of a shared expert do not fit"),
        ({"shared_down": dense(HIDDEN + 16, SHARED, 1)}, "projections of a shared expert do not fit"),
        ({"router": dense(EXPERTS, HIDDEN, 1)}, "projections of an MLP do not fit"),
        ({"shared_gate_up": None}, "projections of an MLP do not fit"),
    ):
        weights = mixture.weights
        mixture.weights = replace(weights, **changed)
        with pytest.raises(ValueError, match=message):
            host.mlp(x, None, mixture.packed(host, F32)[1], residual)
        mixture.weights = weights


@native
def test_equal_logits_choose_the_first_experts() -> None:
    """The router prefers the first three experts, or none."""
    mixture, (x, residual) = Mixture(dense, chosen=3), rows_of(F32)
    found = list[Tensor]()
    for others in (-1.0, 0.0):
        router = torch.zeros(EXPERTS, HIDDEN)
        router[3:] = others
        mixture.weights = replace(mixture.weights, router=DenseWeight(router))
        found.append(host.mlp(x.abs(), None, mixture.packed(host, F32)[1], residual))
    assert torch.equal(*found)


@native
@pytest.mark.parametrize("shared", [0, SHARED])
def test_a_row_that_is_not_finite_does_not_change_the_others(level: str, shared: int) -> None:
    mixture, (x, residual) = Mixture(int4_rounded, shared=shared), rows_of(BF16)
    norm, packed = mixture.packed(host, BF16)
    want = host.mlp(x, norm, packed, residual)
    x[4] = torch.nan
    out = host.mlp(x, norm, packed, residual)
    assert out[4].isnan().all()
    others = [row for row in range(ROWS) if row != 4]
    assert torch.equal(out[others], want[others])


@native
def test_an_expert_whose_router_is_not_finite_is_not_hidden() -> None:
    mixture, (x, residual) = Mixture(dense), rows_of(F32)
    router = mixture.weights.router
    assert isinstance(router, DenseWeight)
    router.weight[5, 0] = torch.nan
    for ops in (host, reference):
        norm, packed = mixture.packed(ops, F32)
        assert ops.mlp(x, norm, packed, residual).isnan().all()


@pytest.mark.parametrize("make", [dense, int4])
@pytest.mark.parametrize(("biased", "shared"), [(False, 0), (True, 0), (False, SHARED)])
def test_the_library_gathers_experts_or_computes_all_without_host_reads(
    monkeypatch: pytest.MonkeyPatch, make: Any, biased: bool, shared: int
) -> None:
    mixture, (x, residual) = Mixture(make, biased=biased, shared=shared), rows_of(F64)
    norm, packed = mixture.packed(unfused, F64)
    want = reference.mlp(x, *mixture.packed(reference, F64), residual)
    found = list[Tensor]()
    for cost in (0, EXPERTS):
        monkeypatch.setattr(library, "GATHER_COST", cost)
        with NoHost():
            found.append(unfused.mlp(x, norm, packed, residual))
    assert all(error(each, want) < 1e-12 for each in found)


def test_an_infinite_output_of_an_expert_reaches_only_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "GATHER_COST", EXPERTS)
    mixture, (x, residual) = Mixture(dense, chosen=1), rows_of(F64)
    down = mixture.weights.down
    assert isinstance(down, DenseWeight)
    down.weight[2 * HIDDEN : 3 * HIDDEN] = torch.inf
    exact_norm, exact = mixture.packed(reference, F64)
    norm, packed = mixture.packed(unfused, F64)
    want = reference.mlp(x, exact_norm, exact, residual).isfinite()
    assert torch.equal(unfused.mlp(x, norm, packed, residual).isfinite(), want) and want.any() and not want.all()
