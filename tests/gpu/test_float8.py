"""Attention over a float8 cache: bitwise identical to bfloat16 with rounded values, also for new keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swiftspec.backends.cuda import cuda
from swiftspec.model.batch import Batch
from tests.gpu.device import DEVICE, EMULATED, emulated_gpu, most, needs_kernels
from tests.gpu.test_cuda_ops import BF16, Cache, close, dice, random, tables, window_batch

pytestmark = [pytest.mark.gpu, needs_kernels]

FP8 = torch.float8_e4m3fn
HEADS, KV_HEADS = 6, 2


def cache_of(k: Tensor, v: Tensor) -> Cache:
    cache = Cache(1, 1, 1, 64)
    cache.k, cache.v = k.clone(), v.clone()
    return cache


def run(
    batch: Batch,
    cache: Cache,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int = HEADS,
    shape: str | None = None,
) -> Tensor:
    return cuda.tree_attention(qkv, cuda.prepare(batch, cache, cos, sin, heads, shape=shape), 1)


def same(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("rows", "length"), most([(9, 130), (3, 1100), (1, 40), (8, 9000)], 2))
@pytest.mark.parametrize("shape", [None, "paired"])
def test_attention_over_float8(rows: int, length: int, dim: int, shape: str | None) -> None:
    capacity, width = length + 5, (HEADS + 2 * KV_HEADS) * dim
    batch = window_batch(rows, length, 2 * rows + 3, length, causal=True)
    codes = torch.randint(0, 256, (2, 1, KV_HEADS, capacity, dim), generator=dice(1), device=DEVICE).to(torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # every number, and NaN not yet
    k, v = random(2, 1, KV_HEADS, capacity, dim, seed=2).to(FP8), codes.view(FP8)

    narrow, wide = cache_of(k, v), cache_of(k.to(BF16), v.to(BF16))
    flat = torch.ones(capacity, dim, dtype=BF16, device=DEVICE), torch.zeros(capacity, dim, dtype=BF16, device=DEVICE)
    exact = random(rows, width, seed=3).to(FP8).to(BF16)
    assert torch.equal(run(batch, narrow, exact, *flat, shape=shape), run(batch, wide, exact, *flat, shape=shape)), (
        "nothing is rounded"
    )
    assert torch.equal(narrow.k.to(BF16), wide.k) and torch.equal(narrow.v.to(BF16), wide.v)

    narrow, wide, single = cache_of(k, v), cache_of(k.to(BF16), v.to(BF16)), cache_of(k, v)
    qkv, turns = random(rows, width, seed=4), tables(dim, capacity, BF16)
    together = run(batch, narrow, qkv, *turns, shape=shape)
    run(batch, wide, qkv, *turns, shape=shape)
    assert same(narrow.k, wide.k.to(FP8)) and same(narrow.v, wide.v.to(FP8))
    seen = torch.ones(1, 8, dtype=torch.bool, device=DEVICE)
    for row in range(rows):  # the keys of the rows before it are in the cache
        at = batch.slots[row : row + 1]
        alone = run(
            Batch(at, at, at, seen, torch.zeros_like(at), at + 1), single, qkv[row : row + 1], *turns, shape=shape
        )
        assert torch.equal(alone[0], together[row])
    assert same(narrow.k, single.k) and same(narrow.v, single.v)

    cuda.make_slot_mover(single.k, single.v)(0, [5, 9, 11], 3)
    assert same(single.k[:, :, :, 3:6].contiguous(), narrow.k[:, :, :, [5, 9, 11]].contiguous())
    narrow.k.view(torch.uint8)[1, 0, 1, 2, 5] = 0x7F
    spoiled = run(batch, narrow, qkv, *turns, shape=shape).view(rows, KV_HEADS, -1)
    assert bool(spoiled[:, 0].isfinite().all()) and bool(spoiled[:, 1].isnan().all()), "NaN is not lost"


@pytest.mark.skipif(not EMULATED, reason="a GPU has the clusters that it has")
@pytest.mark.parametrize("kind", [FP8, BF16])
def test_tiles_of_a_long_row_are_prefetched(kind: torch.dtype) -> None:
    """On a GPU with a cluster per head, whose blocks compute all tiles: a row alone has the same bits, and with several
    parts almost the same numbers."""
    rows, length, dim = 3, 3100, 128
    batch, turns = window_batch(rows, length, 16, 5, causal=True), tables(dim, length, BF16)
    k, v = (random(2, 1, KV_HEADS, length + 5, dim, seed=seed).to(kind) for seed in (2, 3))
    qkv = random(rows, (HEADS + 2 * KV_HEADS) * dim, seed=4)
    at, seen = batch.slots[-1:], torch.ones(1, 8, dtype=torch.bool, device=DEVICE)
    with emulated_gpu(8):
        cache = cache_of(k, v)
        one = run(batch, cache, qkv, *turns)
        alone = run(Batch(at, at, at, seen, torch.zeros_like(at), at + 1), cache, qkv[-1:], *turns)
    assert torch.equal(one[-1], alone[0])
    close(one, run(batch, cache_of(k, v), qkv, *turns))


def test_numbers_are_rounded_as_torch_rounds_them() -> None:
    """All bfloat16 numbers, stored as the values of a batch; larger ones saturate at 448."""
    rows, heads, dim = 64, 8, 128
    numbers = torch.arange(2**16, device=DEVICE).to(torch.uint16).view(BF16).view(rows, heads * dim)
    batch, qkv = window_batch(rows, rows, rows, 1, causal=True), random(rows, 3 * heads * dim, seed=1)
    qkv[:, 2 * heads * dim :] = numbers
    empty = torch.zeros(2, 1, heads, rows, dim, dtype=FP8, device=DEVICE)
    cache = cache_of(empty, empty)
    run(batch, cache, qkv, *tables(dim, rows, BF16), heads)
    got = cache.v[1, 0].transpose(0, 1).reshape(rows, -1)
    want = numbers.float().clamp(-448, 448).to(FP8)
    assert torch.equal(got.float().nan_to_num(1e9), want.float().nan_to_num(1e9))
    finite = ~numbers.isnan()
    assert same(got[finite], want[finite])
