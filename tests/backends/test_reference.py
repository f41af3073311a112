"""Every operator of backends/reference against a straightforward computation in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swiftspec.backends.reference import reference as ops
from swiftspec.model.architectures.decoder import parse_rope
from swiftspec.model.batch import Batch
from swiftspec.model.packed_model import PackedMlp
from swiftspec.model.spec import RopeSpec
from swiftspec.model.weights import DenseWeight
from tests.support.cases import examples
from tests.support.tiny_checkpoints import ROPES, make_model

POISON = 2.0**13  # exact in every dtype
# bounds on |got - exact| relative to the largest |exact|, for results of a few roundings
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def close(got: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == exact.shape and bool(got.isfinite().all())
    assert (got.double() - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max()


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=noise, dtype=torch.float64).to(dtype)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@dtypes
@pytest.mark.parametrize("rows", [1, 8, 24, 130])
@pytest.mark.parametrize("bias", [False, True])
def test_projections(dtype: torch.dtype, rows: int, bias: bool) -> None:
    eps, x = 1e-3, random(rows, 48, dtype=dtype)
    gain, shift = 1 + random(48, seed=1, dtype=dtype), random(80, seed=2, dtype=dtype) if bias else None
    weight, down = random(80, 48, seed=3, dtype=dtype), random(48, 40, seed=4, dtype=dtype)
    norm, packed = ops.pack_norm(gain, eps, dtype, "cpu"), ops.pack(DenseWeight(weight, shift), dtype, "cpu")
    want = rms(x, gain, eps) @ weight.double().T + (0 if shift is None else shift.double())
    got = ops.norm_linear(x, norm, packed)
    assert got.dtype == dtype
    close(got, want, dtype)
    logits = ops.norm_head(x, norm, packed)
    assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    close(logits, want, dtype)
    gated = ops.norm_swiglu(x, norm, packed)
    close(gated, F.silu(want[:, :40]) * want[:, 40:], dtype)
    last, kept = ops.pack(DenseWeight(down), dtype, "cpu"), x.clone()
    product = gated.double() @ down.double().T
    close(ops.linear_residual(gated, last, x), product + x.double(), dtype)
    close(ops.linear_residual(gated, last, x, lambda y: y * 2), 2 * product + x.double(), dtype)
    mlp, residual = PackedMlp(packed, last), random(rows, 48, seed=5, dtype=dtype)
    close(ops.mlp(x, norm, mlp, residual), product + residual.double(), dtype)
    close(ops.mlp(x, norm, mlp, residual, lambda y: y * 2), 2 * product + residual.double(), dtype)
    assert torch.equal(x, kept), "the residual is the caller's"


def test_embedding() -> None:
    weight, tokens = random(20, 6), torch.tensor([3, 19, 0, 3])
    assert torch.equal(ops.embed(tokens, weight), torch.stack([weight[int(t)] for t in tokens]))


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_rope_tables_equal_those_of_transformers(kind: str, dtype: torch.dtype) -> None:
    theirs: Any = make_model(rope=ROPES[kind]).base_model.rotary_emb
    cos, sin = theirs(torch.zeros(1, dtype=dtype), torch.arange(400)[None])
    rope = parse_rope({"rope_parameters": ROPES[kind]})
    ours = ops.rope_tables(rope, 8, 400, dtype, "cpu")
    sign = torch.tensor([-1] * 4 + [1] * 4)
    torch.testing.assert_close(ours[0], cos[0], rtol=0, atol=1e-7 if dtype == torch.float64 else 0)
    torch.testing.assert_close(ours[1], sin[0] * sign, rtol=0, atol=1e-7 if dtype == torch.float64 else 0)


@dataclass
class Cache:
    """Keys and values, filled with poison values until they are written."""

    k: Tensor
    v: Tensor


def new_cache(layers: int, sequences: int, kv_heads: int, capacity: int, width: int, dtype: torch.dtype) -> Cache:
    shape = (layers, sequences, kv_heads, capacity, width)
    return Cache(torch.full(shape, POISON, dtype=dtype), torch.full(shape, POISON, dtype=dtype))


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding of one head [hd] by complex numbers: pair i is (x[i], x[i + hd/2])."""
    half = x.shape[0] // 2
    pairs = torch.complex(x[:half], x[half:]) * torch.exp(1j * angles)
    return torch.cat((pairs.real, pairs.imag))


def naive(
    qkv: Tensor, batch: Batch, old: Cache, layer: int, heads: int, angles: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, Cache]:
    """Attention row by row, head by head; returns the expected output and cache."""
    kv_heads, width = old.k.shape[2], old.k.shape[4]
    new, out = Cache(old.k.double(), old.v.double()), torch.zeros(len(batch), heads * width, dtype=torch.float64)
    split = qkv.double().view(len(batch), -1, width)
    for row in range(len(batch)):
        place = (layer, int(batch.sequence[row]), slice(None), int(batch.slots[row]))
        by = angles[int(batch.positions[row])]
        new.k[place] = torch.stack([turn(x, by) for x in split[row, heads : heads + kv_heads]])
        new.v[place] = split[row, heads + kv_heads :]
    for row in range(len(batch)):
        sequence, window = int(batch.sequence[row]), batch.mask.shape[1]
        length = int(batch.kv_len[sequence])
        # slot s is column s - (length - W) of the window; earlier slots are visible
        seen = [s for s in range(length) if s < length - window or batch.mask[row, s - length + window]]
        for head in range(heads):
            q = turn(split[row, head], angles[int(batch.positions[row])])
            place = (layer, sequence, head * kv_heads // heads, seen)
            weights = (new.k[place] @ q / math.sqrt(width)).exp()
            total = weights.sum() + (0 if sinks is None else sinks[head].exp())
            out[row, head * width : (head + 1) * width] = weights @ new.v[place] / total
    return out, new


def run(
    batch: Batch, cache: Cache, heads: int, dtype: torch.dtype, layer: int = 1, seed: int = 3, normed: bool = False,
    sinks: Tensor | None = None,
) -> None:  # fmt: skip
    """One attention call against the naive one, cache included. `normed`: with a norm of query and key heads."""
    kv_heads, width = cache.k.shape[2], cache.k.shape[4]
    rope = RopeSpec(100.0)
    qkv = random(len(batch), (heads + 2 * kv_heads) * width, seed=seed, dtype=dtype)
    frequencies = 1 / 100.0 ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(200, dtype=torch.float32), frequencies).double()
    norm, plain = None, qkv
    if normed:
        weight, count = random(heads + kv_heads, width, seed=seed + 1, dtype=dtype), heads + kv_heads
        norm, split = ops.pack_norm(weight, 1e-3, dtype, "cpu"), qkv.double().view(len(batch), -1, width)
        plain = torch.cat((rms(split[:, :count], weight, 1e-3), split[:, count:]), 1).flatten(1)
    want, after = naive(plain, batch, cache, layer, heads, angles, sinks)
    cos, sin = ops.rope_tables(rope, width, 200, dtype, "cpu")
    if dtype == torch.float64:  # the tables are float32 inside
        cos, sin = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), 1)
    got = ops.tree_attention(qkv, ops.prepare(batch, cache, cos, sin, heads), layer, norm, sinks)
    assert got.dtype == dtype
    close(got, want, dtype)
    for ours, exact in ((cache.k, after.k), (cache.v, after.v)):
        assert torch.equal(ours == POISON, exact == POISON), "only the rows' own slots are written"
        close(ours.double().where(ours != POISON, 0), exact.where(exact != POISON, 0), dtype)


def tree_batch(rows: int, length: int, window: int, seed: int) -> Batch:
    """Rows at the last slots of one sequence, each seeing itself and a random part of the window before it."""
    slots = torch.arange(length - rows, length)
    columns = torch.arange(length - window, length)
    noise = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, window, generator=noise) < 0.5
    mask &= columns < slots[:, None]
    mask |= columns == slots[:, None]
    positions = torch.randint(0, 150, (rows,), generator=noise)
    return Batch(slots * 3, positions, slots, mask, torch.zeros_like(slots), torch.tensor([length]))


@pytest.mark.sampled(6)
@dtypes
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize(("rows", "length", "window"), [(1, 1, 1), (8, 8, 8), (5, 40, 12), (8, 40, 40), (3, 9, 16)])
@pytest.mark.parametrize(("normed", "sunk"), [(False, False), (True, False), (False, True)])
def test_attention(
    dtype: torch.dtype, heads: int, kv_heads: int, rows: int, length: int, window: int, normed: bool, sunk: bool
) -> None:
    """`sunk`: with attention sinks."""
    cache = new_cache(2, 1, kv_heads, 48, 8, dtype)
    cache.k[:, :, :, : length - rows] = random(2, 1, kv_heads, length - rows, 8, seed=1, dtype=dtype)
    cache.v[:, :, :, : length - rows] = random(2, 1, kv_heads, length - rows, 8, seed=2, dtype=dtype)
    sinks = random(heads, seed=4, dtype=torch.float64) * 3 if sunk else None
    run(tree_batch(rows, length, window, seed=length), cache, heads, dtype, normed=normed, sinks=sinks)


def test_attention_with_many_consecutive_masked_keys() -> None:
    """Whole blocks of keys that a row does not see contain poison values."""
    cache = new_cache(2, 1, 2, 1500, 8, torch.float64)
    batch = tree_batch(4, 1400, 1400, seed=0)
    batch.mask[:] = torch.arange(1400) == batch.slots[:, None]
    batch.mask[2:, 1200] = True
    cache.k[:, :, :, 1200] = random(2, 1, 2, 8, seed=1)
    cache.v[:, :, :, 1200] = random(2, 1, 2, 8, seed=2)
    for dtype in (torch.float64, torch.bfloat16):
        run(batch, Cache(cache.k.to(dtype), cache.v.to(dtype)), 4, dtype)


@given(seed=st.integers(0, 2**31), sequences=st.integers(1, 3), rows=st.integers(1, 9))
@settings(max_examples=examples(30))
def test_rows_of_several_sequences_at_any_slots(seed: int, sequences: int, rows: int) -> None:
    """Several sequences with any number of rows each, in any order, at slots with gaps."""
    noise = torch.Generator().manual_seed(seed)
    cache = new_cache(2, sequences, 2, 30, 8, torch.float64)
    sequence = torch.randint(0, sequences, (rows,), generator=noise)
    lengths = torch.randint(12, 30, (sequences,), generator=noise)
    slots = torch.stack([torch.randperm(12, generator=noise)[:rows] for _ in range(sequences)])
    slots = (lengths[:, None] - 12 + slots)[sequence, torch.arange(rows)]
    for s in range(sequences):
        cache.k[:, s, :, : lengths[s]] = random(2, 2, int(lengths[s]), 8, seed=s)
        cache.v[:, s, :, : lengths[s]] = random(2, 2, int(lengths[s]), 8, seed=s + 10)
    window = 12 + seed % 5
    mask = torch.rand(rows, window, generator=noise) < 0.5
    mask[torch.arange(rows), slots - lengths[sequence] + window] = True
    positions = torch.randint(0, 150, (rows,), generator=noise)
    run(Batch(slots, positions, slots, mask, sequence, lengths), cache, 4, torch.float64, layer=seed % 2)


@given(seed=st.integers(0, 2**31), count=st.integers(0, 12), start=st.integers(0, 5))
@settings(max_examples=examples(30))
def test_mover(seed: int, count: int, start: int) -> None:
    k, v = random(2, 2, 3, 20, 4, seed=1), random(2, 2, 3, 20, 4, seed=2)
    picked = torch.randperm(20 - start, generator=torch.Generator().manual_seed(seed))[:count]
    source = picked.sort().values + start
    want = [x.clone() for x in (k, v)]
    for x, before in zip(want, (k, v)):
        for i, slot in enumerate(source.tolist()):
            x[:, 1, :, start + i] = before[:, 1, :, slot]
    ops.make_slot_mover(k, v)(1, source.tolist(), start)
    assert torch.equal(k, want[0]) and torch.equal(v, want[1])
