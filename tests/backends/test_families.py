"""Families of operators: a model runs with any of them taken from another backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from swiftspec.backends.cpu import cpu
from swiftspec.backends.cuda import CudaNorm, cuda
from swiftspec.backends.families import FAMILIES, OTHER_NAMES, Family, compose
from swiftspec.backends.reference import reference
from swiftspec.backends.reference.packing import ReferenceNorm
from swiftspec.backends.unfused import unfused
from swiftspec.model.batch import Batch
from swiftspec.model.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from swiftspec.model.transformer import Transformer
from swiftspec.model.weights import DenseWeight, LayerWeights, ModelWeights
from tests.support.roles import make_runner

VOCAB, F32, CPU = 48, torch.float32, torch.device("cpu")
MIXER = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeSpec(1e4), qk_norm="head")
SPEC = ModelSpec(VOCAB, 32, (LayerSpec(MIXER, MlpSpec(40)),) * 2, norm_eps=1e-5, tie_word_embeddings=False)


def test_each_operator_of_the_cuda_backend_is_in_one_family() -> None:
    names = [name for members in FAMILIES.values() for name in members]
    assert sorted([*names, *OTHER_NAMES]) == sorted(cuda.__all__)


def exact(norm: CudaNorm) -> ReferenceNorm:
    assert isinstance(norm, CudaNorm)
    return reference.pack_norm(norm.weight, norm.eps, F32, CPU)


class StandIn(SimpleNamespace):
    """The arithmetic of backends/reference with the packed norms of backends/cuda. `called`: names of its functions
    that were called."""

    def __init__(self) -> None:
        self.called: set[str] = set()
        own: dict[str, Callable[..., Any]] = {
            "pack_norm": lambda weight, eps, dtype, device: CudaNorm(weight.to(device, dtype), eps),
            "norm_linear": lambda x, norm, *rest: reference.norm_linear(x, exact(norm), *rest),
            "norm_swiglu": lambda x, norm, *rest: reference.norm_swiglu(x, exact(norm), *rest),
            "mlp": lambda x, norm, *rest: reference.mlp(x, exact(norm), *rest),
            "norm_head": lambda x, norm, *rest: reference.norm_head(x, exact(norm), *rest),
            "tree_attention": lambda qkv, plan, layer, norm, *rest: reference.tree_attention(
                qkv, plan, layer, exact(norm), *rest
            ),
        }
        names = {name for members in FAMILIES.values() for name in members if hasattr(reference, name)}
        functions = {name: own.get(name, getattr(reference, name)) for name in names}
        super().__init__(**{name: self._noting(name, function) for name, function in functions.items()})
        self.PREFILL_CHUNK_ROWS, self.PEER_ALL_REDUCE, self.DRAFT_HEAD, self.MAX_CAPTURED_SEQUENCES = (
            1024,
            True,
            "int4",
            64,
        )

    def _noting(self, name: str, function: Any) -> Any:
        if not callable(function) or isinstance(function, type):
            return function

        @wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.called.add(name)
            return function(*args, **kwargs)

        return noted


def weights() -> ModelWeights:
    dice = torch.Generator().manual_seed(1)

    def dense(outputs: int, inputs: int) -> DenseWeight:
        return DenseWeight(torch.randn(outputs, inputs, generator=dice).mul_(2 * inputs**-0.5))

    def layer() -> LayerWeights:
        one, heads = torch.rand(32, generator=dice) + 0.5, torch.rand(1, 8, generator=dice) + 0.5
        qkv, o, gate_up, down = dense(64, 32), dense(32, 32), dense(80, 32), dense(32, 40)
        return LayerWeights(one, qkv, o, one, gate_up, down, q_norm=heads, k_norm=heads)

    head = dense(VOCAB, 32)
    return ModelWeights(dense(VOCAB, 32).weight, [layer, layer], torch.ones(32), lambda: head)


def logits(ops: Any) -> Tensor:
    """Logits of a tree of three nodes behind a prompt, after slots have moved."""
    model = Transformer(SPEC, weights(), ops, CPU, F32, 64)
    runner = make_runner(model, ops, VOCAB, context=32, tree_slots=8)
    runner.prefill([3, 1, 4, 1, 5, 9])
    slots = torch.tensor([6, 7, 8])
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    batch = Batch(
        torch.tensor([7, 8, 9]), torch.tensor([6, 7, 7]), slots, mask, torch.zeros(3).long(), torch.tensor([9])
    )
    out = model.forward(batch, runner.cache).logits
    runner.cache.kv.move(0, [8], 7)
    assert out is not None
    return ops.log_probs(out, VOCAB, ops.draw(out, VOCAB))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_runs_with_each_family_from_another_backend(family: Family) -> None:
    native = StandIn()
    found = logits(compose(native, unfused, [family]))
    torch.testing.assert_close(found, logits(reference))
    assert not native.called & {*FAMILIES[family]} - {"pack_norm"}
    others = {name for other, members in FAMILIES.items() for name in members if other != family}
    assert native.called & others


def test_limits_are_those_of_the_families_that_set_them() -> None:
    def limits(*families: Family) -> tuple[Any, ...]:
        ops = compose(StandIn(), unfused, families)
        return ops.PREFILL_CHUNK_ROWS, ops.PEER_ALL_REDUCE, ops.DRAFT_HEAD, ops.MAX_CAPTURED_SEQUENCES

    assert limits() == limits("sampling", "cache") == (1024, True, "int4", 64)
    assert limits("projections") == (256, False, None, 64)
    assert limits("attention") == (256, True, "int4", 1)
    assert (cpu.DRAFT_HEAD, cpu.PEER_ALL_REDUCE, cuda.DRAFT_HEAD, cuda.PEER_ALL_REDUCE) == (None, False, "int4", True)


def test_all_families_or_none_are_a_whole_module() -> None:
    assert compose(cuda, unfused, ()) is cuda
    assert compose(cuda, unfused, [*FAMILIES]) is unfused
    some = compose(cuda, unfused, ["resampling", "tree"])
    assert not hasattr(some, "resample") and some.device_tree is unfused.device_tree and some.draw is cuda.draw
