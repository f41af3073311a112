"""Families of operators: a model runs with any of them taken from another backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor

from swiftspec.backends.cpu import cpu
from swiftspec.backends.cuda import CudaBackend, cuda
from swiftspec.backends.cuda.norm import CudaNorm
from swiftspec.backends.families import FAMILIES, Family, compose
from swiftspec.backends.reference import Backend, reference
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


# names of the CUDA backend that belong to no family: of both sources the smaller number of rows, checks before the
# choice, and what only native projections have
OTHER_NAMES = {
    "PREFETCH_BYTES", "PREFILL_CHUNK_ROWS", "check_spec", "check_supported", "enable_weight_prefetch",
    "name", "qkv_attention", "tilings_of", "with_tiling",
}  # fmt: skip


def test_each_operator_of_the_cuda_backend_is_in_one_family() -> None:
    names = [name for members in FAMILIES.values() for name in members]
    own = {name for name in vars(CudaBackend) if not name.startswith("_")}
    assert len(names) == len({*names}) and own <= {*names} | OTHER_NAMES
    assert all(hasattr(reference, name) for name in names)


def exact(norm: CudaNorm) -> ReferenceNorm:
    assert isinstance(norm, CudaNorm)
    return reference.pack_norm(norm.weight, norm.eps, F32, CPU)


def stand_in(called: set[str]) -> Backend:
    """The arithmetic of backends/reference with the properties and the packed norms of backends/cuda. `called`: the
    names of its operators that are called are added to it."""
    own: dict[str, Callable[..., Any]] = {
        "pack_norm": lambda weight, eps, dtype, device: CudaNorm(weight.to(device, dtype), eps),
        "norm_linear": lambda x, norm, *rest: reference.norm_linear(x, exact(norm), *rest),
        "norm_swiglu": lambda x, norm, *rest: reference.norm_swiglu(x, exact(norm), *rest),
        "mlp": lambda x, norm, *rest, **more: reference.mlp(x, exact(norm), *rest, **more),
        "norm_head": lambda x, norm, *rest: reference.norm_head(x, exact(norm), *rest),
        "tree_attention": lambda qkv, plan, layer, norm, *rest: reference.tree_attention(
            qkv, plan, layer, exact(norm), *rest
        ),
    }

    def noting(name: str, function: Any) -> Any:
        @wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return function(*args, **kwargs)

        return noted

    names = {name for members in FAMILIES.values() for name in members if callable(getattr(reference, name))}
    return cuda.with_operators(**{name: noting(name, own.get(name, getattr(reference, name))) for name in names})


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


def logits(ops: Backend) -> Tensor:
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
    called = set[str]()
    found = logits(compose(stand_in(called), unfused, [family]))
    torch.testing.assert_close(found, logits(reference))
    assert not called & {*FAMILIES[family]} - {"pack_norm"}
    others = {name for other, members in FAMILIES.items() for name in members if other != family}
    assert called & others


def test_limits_are_those_of_the_families_that_set_them() -> None:
    def limits(*families: Family) -> tuple[Any, ...]:
        ops = compose(cuda, unfused, families)
        return ops.PREFILL_CHUNK_ROWS, ops.PEER_ALL_REDUCE, ops.DRAFT_HEAD, ops.MAX_CAPTURED_SEQUENCES

    assert limits() == limits("sampling", "cache") == (1024, True, "int4", 64)
    assert limits("projections") == (256, False, None, 64)
    assert limits("attention") == (256, True, "int4", 1)
    assert (cpu.DRAFT_HEAD, cpu.PEER_ALL_REDUCE, cuda.DRAFT_HEAD, cuda.PEER_ALL_REDUCE) == (None, False, "int4", True)


def test_all_families_or_none_are_a_whole_backend() -> None:
    assert compose(cuda, unfused, ()) is cuda
    assert compose(cuda, unfused, [*FAMILIES]) is unfused
    some = compose(cuda, unfused, ["resampling", "tree"])
    assert some.resample is unfused.resample and some.draw is cuda.draw
    assert some.device_tree(4, 1, 1, 8, CPU) is None
