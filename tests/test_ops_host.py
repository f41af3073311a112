"""The native operators against the reference, and the promise that a row does not depend on the others."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.batch import Batch
from swiftspec.config import ModelConfig
from swiftspec.engine import LLM
from swiftspec.model.linear import DenseWeight
from swiftspec.model.loader import load_model
from swiftspec.ops import host, reference
from swiftspec.params import SamplingParams
from swiftspec.spec.kv_cache import KVCache
from swiftspec.worker.local_drafter import LocalDrafter
from swiftspec.worker.roles import Options
from tests.tiny import make_checkpoint

pytestmark = pytest.mark.skipif(not _C.has_bf16(), reason="this CPU has no AVX-512 BF16")

BF16 = torch.bfloat16


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(BF16)


def close(ours: Tensor, theirs: Tensor) -> None:
    """Within what rounding to bfloat16 in other places may change."""
    assert ours.shape == theirs.shape
    error = (ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-9)
    assert float(error) < 6e-3


def weights(n: int, k: int, seed: int, bias: bool = False) -> tuple[Any, Any]:
    weight = DenseWeight(random(n, k, seed=seed, scale=k**-0.5), random(n, seed=seed + 1) if bias else None)
    return host.pack(weight, BF16, "cpu"), reference.pack(weight, BF16, "cpu")


def norms(k: int, seed: int) -> tuple[Any, Any]:
    weight = random(k, seed=seed) + 1
    return host.pack_norm(weight, 1e-5, BF16, "cpu"), reference.pack_norm(weight, 1e-5, BF16, "cpu")


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 40])
@pytest.mark.parametrize(("n", "k"), [(16, 16), (48, 32), (640, 384), (160, 448)])
def test_linear(rows: int, n: int, k: int) -> None:
    x, residual = random(rows, k, seed=rows, scale=3.0), random(rows, n, seed=2)
    (norm, norm_ref), (ours, theirs), (biased, biased_ref) = norms(k, 3), weights(n, k, 4), weights(n, k, 5, bias=True)
    close(host.norm_linear(x, norm, ours), reference.norm_linear(x, norm_ref, theirs))
    close(host.norm_linear(x, norm, biased), reference.norm_linear(x, norm_ref, biased_ref))
    close(host.linear_residual(x, ours, residual), reference.linear_residual(x, theirs, residual))
    double = host.linear_residual(x, ours, residual, reduce=lambda product: product * 2)
    close(double, reference.linear_residual(x, theirs, residual, reduce=lambda product: product * 2))
    if n % 32 == 0:
        close(host.norm_swiglu(x, norm, biased), reference.norm_swiglu(x, norm_ref, biased_ref))


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 97, 4096])
def test_the_head_has_a_row_for_every_token(vocab: int) -> None:
    x, (norm, norm_ref), (ours, theirs) = random(5, 64, seed=1), norms(64, 2), weights(vocab, 64, 3)
    logits = host.norm_head(x, norm, ours)
    assert logits.dtype == torch.float32
    close(logits, reference.norm_head(x, norm_ref, theirs))


def test_a_row_does_not_depend_on_the_others() -> None:
    x, (norm, _), (ours, _) = random(21, 128, seed=1), norms(128, 2), weights(96, 128, 3)
    together = host.norm_linear(x, norm, ours)
    for row in range(21):
        assert torch.equal(host.norm_linear(x[row : row + 1].contiguous(), norm, ours)[0], together[row])


class Cache:
    def __init__(self, sequences: int, kv_heads: int, capacity: int, dim: int) -> None:
        self.k = random(2, sequences, kv_heads, capacity, dim, seed=8)
        self.v = random(2, sequences, kv_heads, capacity, dim, seed=9)


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (5, 1), (16, 1)])
@pytest.mark.parametrize(("rows", "length", "window"), [(1, 1, 8), (8, 8, 8), (5, 40, 16), (8, 100, 64), (20, 33, 32)])
def test_attention(dim: int, heads: int, kv_heads: int, rows: int, length: int, window: int) -> None:
    slots = torch.arange(length - rows, length)
    columns = torch.arange(length - window, length)
    mask = torch.rand(rows, window, generator=torch.Generator().manual_seed(length)) < 0.5
    mask = mask & (columns < slots[:, None]) | (columns == slots[:, None])
    batch = Batch(slots, slots + 3, slots, mask, torch.zeros_like(slots), torch.tensor([length]))
    check_attention(batch, Cache(1, kv_heads, 128, dim), Cache(1, kv_heads, 128, dim), heads)


def test_attention_over_two_sequences_with_slots_out_of_order() -> None:
    sequence, slots = torch.tensor([1, 0, 1, 0, 1]), torch.tensor([6, 9, 4, 8, 5])
    mask = torch.ones(5, 8, dtype=torch.bool)
    batch = Batch(slots, slots, slots, mask, sequence, torch.tensor([10, 7]))
    check_attention(batch, Cache(2, 2, 16, 32), Cache(2, 2, 16, 32), 4)


def check_attention(batch: Batch, ours: Cache, theirs: Cache, heads: int) -> None:
    kv_heads, dim = ours.k.shape[2], ours.k.shape[4]
    rope = ModelConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": heads * dim,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "num_hidden_layers": 2,
            "intermediate_size": 32,
            "vocab_size": 8,
        }
    ).rope
    cos, sin = reference.rope_tables(rope, dim, 200, BF16, "cpu")
    qkv = random(len(batch), (heads + 2 * kv_heads) * dim, seed=4)
    got = host.tree_attention(qkv, host.prepare(batch, ours, cos, sin, heads), 1)
    want = reference.tree_attention(qkv, reference.prepare(batch, theirs, cos, sin, heads), 1)
    close(got, want)
    close(ours.k, theirs.k)
    assert torch.equal(ours.v, theirs.v) and torch.equal(ours.k[0], theirs.k[0])


@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (5, 5), (16, 3), (33, 8), (4096, 8), (4096, 64)])
def test_log_top_k(vocab: int, k: int) -> None:
    scores = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    if vocab > 8:
        scores[1, ::2] = -torch.inf
        scores[2, 3] = 1e9
    tokens, values = host.log_top_k(scores, k)
    torch.testing.assert_close(values, reference.log_top_k(scores, k)[1], rtol=1e-5, atol=1e-5)
    assert torch.equal(scores.gather(1, tokens), scores.topk(k).values)


def test_log_top_k_without_candidates() -> None:
    scores = torch.full((2, 20), torch.nan)
    scores[1] = -torch.inf
    tokens, values = host.log_top_k(scores, 4)
    assert not (values > -torch.inf).any() and ((tokens >= 0) & (tokens < 20)).all()
    tied, _ = host.log_top_k(torch.zeros(1, 20), 4)
    assert tied.tolist() == [[0, 1, 2, 3]], "of equal scores the earlier tokens"


def test_sizes_that_the_registers_do_not_hold_take_the_reference() -> None:
    shape = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "vocab_size": 8}
    good = {**shape, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 48}
    assert host.fits(ModelConfig.from_dict(good), BF16, "cpu")
    assert not host.fits(ModelConfig.from_dict(good), torch.float32, "cpu")
    for odd in ({"head_dim": 16}, {"hidden_size": 72, "head_dim": 32}, {"intermediate_size": 40}):
        assert not host.fits(ModelConfig.from_dict(good | odd), BF16, "cpu")


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_model_is_as_close_to_float32_as_on_the_reference(tmp_path: Path, family: str) -> None:
    shape = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    make_checkpoint(tmp_path, family=family, vocab=97, layers=3, dtype=torch.float32, seed=6, **shape)
    tokens, mask = torch.arange(30), torch.ones(30, 30, dtype=torch.bool).tril()
    batch = Batch(tokens, tokens, tokens, mask, torch.zeros_like(tokens), torch.tensor([30]))

    def logits(ops: Any, dtype: torch.dtype) -> Tensor:
        model = load_model(tmp_path, dtype=dtype, ops=ops, max_positions=64)
        out = model.forward(batch, KVCache(3, 2, 32, 64, ops.move_kv, dtype=dtype))
        assert out is not None
        return out.float()

    exact = logits(reference, torch.float32)
    ours, theirs = ((logits(ops, BF16) - exact).norm() for ops in (host, reference))
    assert float(ours) < 1.2 * float(theirs) < 0.3 * float(exact.norm())


def test_the_engine_takes_them_where_they_fit(tmp_path: Path) -> None:
    shape = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    make_checkpoint(tmp_path, vocab=97, layers=2, dtype=torch.float32, seed=6, **shape)
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    cases: list[tuple[Options, ModuleType]] = [
        ({"dtype": BF16}, host),
        ({"dtype": torch.float32}, reference),
        ({"dtype": BF16, "ops": "reference"}, reference),
    ]
    for options, ops in cases:
        llm = LLM(tmp_path, tmp_path, **options)
        assert isinstance(llm.drafter, LocalDrafter) and llm.drafter.runner.ops is ops
        answer = llm.generate([5, 17, 3], sampling)
        assert len(answer.token_ids) == 24 and answer.stats.rounds < 24 and answer.stats.drafter_lost is None
