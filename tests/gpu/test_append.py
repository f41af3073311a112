"""QKV projections that apply RoPE and append to the cache: bitwise the projection, then attention; and other kernels on
their tiles."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cuda import cuda, large_m
from swiftspec.backends.cuda import linear as ops
from swiftspec.backends.cuda.linear import CudaLinear
from swiftspec.backends.cuda.tree import DeviceTree
from swiftspec.model.batch import Batch
from tests.gpu.device import DEVICE, EMULATED, FEW, WHY_NOT, emulated_gpu, most, needs_kernels
from tests.gpu.test_cuda_ops import BF16, Cache, close, dice, random, tables, window_batch
from tests.gpu.test_linear import norm_of, rows_of, weight

pytestmark = [pytest.mark.gpu, needs_kernels]

FP8 = torch.float8_e4m3fn
CLUSTERS = WHY_NOT == "" and _C.cuda_device()["at_once"][1] > 0
HIDDEN = 512 if EMULATED else 4096
Shape = tuple[int, int, int, int, bool]  # query heads, key-value heads, head dimension, int4 group (0: bfloat16), bias
LARGE: Shape = (32, 8, 128, 128, False)
SHAPES = most([(4, 2, 64, 128, True), (3, 1, 128, 32, False), (7, 1, 64, 64, True), (2, 2, 128, 0, True), LARGE], 4)
# rows, sequences, type of the cache
BATCHES = [(8, 1, BF16), (3, 2, FP8), (8, 2, BF16), (1, 1, FP8)]


def packed_pair(heads: int, kv_heads: int, dim: int, group: int, bias: bool) -> tuple[CudaLinear, CudaLinear]:
    """A QKV projection in the usual tiles, and in those that can append."""
    qkv = weight(HIDDEN, (heads + 2 * kv_heads) * dim, group, bias=bias)
    return ops.pack(qkv, BF16, DEVICE), cuda.pack_qkv(qkv, dim, BF16, DEVICE)


def with_variants(packed: CudaLinear) -> list[CudaLinear]:
    """The projection with the default tiling and with some of each variant."""
    return [ops.with_tiling(packed, tiling) for tiling in ops.tilings_of(packed, 1 if FEW else 3)]


def bits(cache: Cache) -> tuple[Tensor, Tensor]:
    return cache.k.view(torch.uint8), cache.v.view(torch.uint8)


def equal(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def copy_of(cache: Cache, dtype: torch.dtype = BF16) -> Cache:
    other = Cache(1, 1, 1, 64)
    other.k, other.v = cache.k.to(dtype, copy=True), cache.v.to(dtype, copy=True)
    return other


class Layers:
    """Two layers on the same weights, the inputs of which are written by the launch in front of each."""

    def __init__(self, rows: int, capacity: int, dim: int) -> None:
        self.norm, self.turns = norm_of(HIDDEN), tables(dim, capacity, BF16)
        self.sources = [rows_of(rows, HIDDEN, seed) for seed in (5, 6)]
        self.order = torch.arange(rows, device=DEVICE)

    def run(
        self, packed: CudaLinear, batch: Batch, cache: Cache, heads: int, *, fused: bool
    ) -> tuple[tuple[Tensor, ...], Cache]:
        """Returns the outputs of attention and the cache."""
        plan, found = cuda.prepare(batch, cache, *self.turns, heads), list[Tensor]()
        for layer, source in enumerate(self.sources):
            x = source if layer == 0 else cuda.embed(self.order, source)
            if fused:
                assert plan.slices[0][1].appends(packed.native)
                found.append(cuda.qkv_attention(x, self.norm, packed, plan, layer))
            else:
                found.append(cuda.tree_attention(cuda.norm_linear(x, self.norm, packed), plan, layer))
        return tuple(found), cache


def same(ours: tuple[tuple[Tensor, ...], Cache], theirs: tuple[tuple[Tensor, ...], Cache]) -> bool:
    """Whether outputs and whole caches are bitwise equal."""
    return equal(ours[0], theirs[0]) and equal(bits(ours[1]), bits(theirs[1]))


def two_sequences(rows: int) -> Batch:
    """Rows of both sequences in turn, whose slots and positions are out of order."""
    sequence = torch.arange(rows, device=DEVICE) % 2
    kv_len = torch.tensor([70, 41], device=DEVICE)
    slots = kv_len[sequence] - 1 - torch.arange(rows, device=DEVICE) // 2
    columns = kv_len[sequence, None] - 24 + torch.arange(24, device=DEVICE)
    return Batch(slots, slots - 3, slots, columns <= slots[:, None], sequence, kv_len)


# on the emulated GPU one batch with each shape
CASES = [*zip(SHAPES, BATCHES, strict=False)] if EMULATED else [*itertools.product(SHAPES, BATCHES)]


@pytest.mark.parametrize(("shape", "of"), CASES)
def test_an_appending_projection_has_the_bits_of_separate_launches(
    shape: Shape, of: tuple[int, int, torch.dtype]
) -> None:
    """Attention of two layers and the whole cache, with tilings of each variant, against the usual tiles."""
    heads, kv_heads, dim, group, _ = shape
    rows, sequences, dtype = of
    usual, packed = packed_pair(*shape)
    batch = window_batch(rows, 41, 32, 3) if sequences == 1 else two_sequences(rows)
    before, layers = copy_of(Cache(sequences, kv_heads, 79, dim), dtype), Layers(rows, 79, dim)
    variants = {mine.native.row[0] for mine in with_variants(packed)}
    few = {"ring", "direct"} if group else {"ring"}
    assert variants == (few | {"stream"} if group and CLUSTERS else few)
    for mine, theirs in zip(with_variants(packed), with_variants(usual), strict=True):
        got = layers.run(mine, batch, copy_of(before, dtype), heads, fused=True)
        want = layers.run(theirs, batch, copy_of(before, dtype), heads, fused=False)
        assert same(got, want), mine.native.row


def test_an_appending_projection_with_all_tilings() -> None:
    """Clusters of every size, blocks of one and two strips, and more strips than are computed at a time."""
    qkv, norm, x = weight(2048, 5 * 64, 128), norm_of(2048), rows_of(5, 2048)
    batch = window_batch(5, 9, 8, 3, causal=True)
    with emulated_gpu(8) if EMULATED else nullcontext():
        packed = cuda.pack_qkv(qkv, 64, BF16, DEVICE)
        tilings = ops.tilings_of(packed, 100)
        assert {tiling.cluster for tiling in tilings} == ({1, 2, 4, 8} if CLUSTERS else {1})
        for mine in (ops.with_tiling(packed, tiling) for tiling in tilings):
            caches = Cache(1, 1, 9, 64), Cache(1, 1, 9, 64)
            plans = [cuda.prepare(batch, cache, *tables(64, 9, BF16), 3) for cache in caches]
            got = cuda.qkv_attention(x, norm, mine, plans[0], 0)
            assert torch.equal(got, cuda.tree_attention(cuda.norm_linear(x, norm, mine), plans[1], 0)), mine.native.row
            assert equal(bits(caches[0]), bits(caches[1])), mine.native.row


@pytest.mark.parametrize(("rows", "length"), [(1, 256), (8, 400)])
def test_later_layers_load_before_an_appending_projection_has_ended(rows: int, length: int) -> None:
    """As test_later_layers_load_before_the_wait."""
    shape = (4, 2, 128, 128, False)
    packed, batch = packed_pair(*shape)[1], window_batch(rows, length, 32, 3, causal=True)
    layers = Layers(rows, length, 128)
    for mine in with_variants(packed):
        got, want = (layers.run(mine, batch, Cache(1, 2, length, 128), 4, fused=fused) for fused in (True, False))
        assert same(got, want), mine.native.row


def test_slots_and_positions_that_a_kernel_has_just_written() -> None:
    """Those of the leaves of a tree on the device, in the first layer."""
    shape, w, prefix = (4, 2, 64, 128, False), 3, torch.tensor([40], device=DEVICE)
    packed, layers = packed_pair(*shape)[1], Layers(w, 64, 64)
    for mine in with_variants(packed):
        found: list[tuple[tuple[Tensor, ...], Cache]] = []
        for fused in (True, False):
            tree, cache = DeviceTree(20, 3, w, DEVICE), Cache(1, 2, 64, 64)
            first = -(torch.randint(0, 9, (1, 3), generator=dice(9), device=DEVICE) / 8)
            tree.add_root(torch.tensor([5], device=DEVICE), prefix, torch.arange(3, device=DEVICE).view(1, 3), first)
            sequence, kv_len = torch.zeros(w, dtype=torch.int64, device=DEVICE), prefix + 20
            leaves = tree.best_leaves(prefix)
            batch = Batch(leaves.tokens, leaves.positions, leaves.slots, leaves.mask, sequence, kv_len)
            found.append(layers.run(mine, batch, cache, 4, fused=fused))
        assert same(*found), mine.native.row


@pytest.mark.parametrize("shape", SHAPES)
def test_other_kernels_store_its_results_in_the_usual_order(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Projections without append, of few rows and of many, of prefill chunks, and products of unpacked weights."""
    usual, packed = packed_pair(*shape)
    norm, x = norm_of(HIDDEN), rows_of(large_m.MAX_KERNEL_ROWS + 8, HIDDEN)
    monkeypatch.setattr(large_m, "SCRATCH_BYTES", 2 * 64 * HIDDEN * 2)  # a head or two at a time
    for mine, theirs in zip(with_variants(packed), with_variants(usual), strict=True):
        residual = rows_of(5, packed.outputs, 3)
        got, want = (cuda.linear_residual(x[:5], each, residual) for each in (mine, theirs))
        assert torch.equal(got, want), mine.native.row
        assert torch.equal(cuda.norm_linear(x[:5], norm, mine), cuda.norm_linear(x[:5], norm, theirs)), mine.native.row
    for count in (40, len(x)) if EMULATED else (1, 8, 9, 20, 33, 40, 100, 168, len(x)):
        residual = rows_of(count, packed.outputs, 3)
        got, want = (cuda.linear_residual(x[:count], each, residual) for each in (packed, usual))
        if count <= large_m.MAX_KERNEL_ROWS:
            assert torch.equal(got, want), count
        else:  # a library may add slices of other widths in another order
            close(got, want)
    with large_m.prefill_chunk():
        assert torch.equal(cuda.norm_linear(x[:100], norm, packed), cuda.norm_linear(x[:100], norm, usual))
        got, want = (cuda.linear_residual(x[:100], each, rows_of(100, packed.outputs)) for each in (packed, usual))
        assert torch.equal(got, want)


def test_more_rows_and_other_operators_take_separate_launches() -> None:
    shape, heads = (4, 2, 64, 128, False), 4
    usual, packed = packed_pair(*shape)
    norm, head_norms = norm_of(HIDDEN), cuda.pack_norm(random(6, 64, seed=5), 1e-6, BF16, DEVICE)
    for rows, matrix, qk_norm in ((9, packed, None), (8, usual, None), (8, packed, head_norms)):
        batch, x = window_batch(rows, 130, 32, 1), rows_of(rows, HIDDEN)
        ours, want = Cache(1, 2, 135, 64), Cache(1, 2, 135, 64)
        plans = [cuda.prepare(batch, cache, *tables(64, 140, BF16), heads) for cache in (ours, want)]
        got = cuda.qkv_attention(x, norm, matrix, plans[0], 1, qk_norm)
        assert torch.equal(got, cuda.tree_attention(cuda.norm_linear(x, norm, usual), plans[1], 1, qk_norm))
        assert equal(bits(ours), bits(want))
    with pytest.raises(ValueError, match="swiglu"):
        cuda.norm_swiglu(rows_of(1, HIDDEN), norm, packed)
    with pytest.raises(ValueError, match="a part of a head"):
        cuda.pack_qkv(weight(256, 200, 128), 64, BF16, DEVICE)
