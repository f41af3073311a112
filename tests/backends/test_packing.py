"""Native weight packing against the same in torch; results are bitwise identical."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cpu.packing import PackedLinear, pack
from swiftspec.model.formats.int4 import AWQ_ORDER, Int4Weight, pack_int4, unpack_int4
from swiftspec.model.formats.int8 import Int8Weight, LazyInt8Weight
from swiftspec.model.weights import DenseWeight, fuse_weights
from tests.support.cases import examples

pytestmark = pytest.mark.skipif(_C.level() == "none", reason="this CPU has no AVX2")

ORDERS = ("outputs", "awq", "inputs")
KINDS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def blocks_of_codes(codes: Tensor) -> Tensor:
    """Codes [K, N] -> [N / 16, K / 8, 16]: input 2i of each word is nibble i, input 2i + 1 nibble 4 + i."""
    padded = F.pad(codes, (0, -codes.shape[1] % 16)).int().unflatten(0, (-1, 4, 2))
    shifts = torch.tensor([[0, 16], [4, 20], [8, 24], [12, 28]], dtype=torch.int32)
    words = (padded << shifts.unsqueeze(-1)).sum((1, 2), dtype=torch.int32)
    return words.unflatten(1, (-1, 16)).transpose(0, 1).contiguous()


def by_blocks(groups: Tensor) -> Tensor:
    """[K / g, N] -> [N / 16, K / g, 16]."""
    return F.pad(groups, (0, -groups.shape[1] % 16)).unflatten(1, (-1, 16)).transpose(0, 1).contiguous()


def blocks_of_dense(dense: Tensor) -> Tensor:
    blocks = F.pad(dense, (0, -dense.shape[1] % 8, 0, -dense.shape[0] % 16)).unflatten(0, (-1, 16))
    if dense.dtype == torch.bfloat16:
        return blocks.unflatten(2, (-1, 2)).transpose(1, 2).contiguous()
    return blocks.transpose(1, 2).contiguous()


def same(packed: PackedLinear, data: Tensor, scales: Tensor | None = None, zeros: Tensor | None = None) -> None:
    for ours, theirs in ((packed.data, data), (packed.scales, scales), (packed.zeros, zeros)):
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or (ours.dtype == theirs.dtype and torch.equal(ours, theirs))


def int4(order: str, n: int, k: int, group: int, kind: torch.dtype, noise: torch.Generator) -> Int4Weight:
    """A weight of random codes in the layout of a checkpoint."""
    codes, zeros = (torch.randint(0, 16, (rows, n), dtype=torch.uint8, generator=noise) for rows in (k, k // group))
    scales = torch.randn(k // group, n, generator=noise).to(kind)
    if order == "inputs":
        packed, words = pack_int4(codes.T.contiguous()), pack_int4(zeros).T.contiguous()
        return Int4Weight(packed, scales.T.contiguous(), words, group, order="inputs")
    nibbles = AWQ_ORDER if order == "awq" else range(8)
    words = pack_int4(codes, nibbles), pack_int4(zeros, nibbles)
    return Int4Weight(words[0], scales, words[1], group, order="awq" if order == "awq" else "outputs")


def expected(weight: Int4Weight) -> tuple[Tensor, Tensor, Tensor]:
    codes, scales, zeros = weight.unpack()
    assert weight.in_order().order == "outputs" and torch.equal(unpack_int4(weight.in_order().packed), codes)
    kind = torch.float32 if scales.dtype == torch.float64 else scales.dtype
    return blocks_of_codes(codes), by_blocks(scales.to(kind)), by_blocks(zeros)


@given(
    st.sampled_from(ORDERS), st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 5),
    st.sampled_from([32, 64, 128]), st.sampled_from(KINDS), st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=examples(60))
def test_int4(order: str, eights: list[int], groups: int, group: int, kind: torch.dtype, seed: int) -> None:
    """Every code order of checkpoints, and several matrices packed as one."""
    noise = torch.Generator().manual_seed(seed)
    weight = fuse_weights([int4(order, 8 * n, groups * group, group, kind, noise) for n in eights])
    assert isinstance(weight, Int4Weight)
    same(pack(weight, torch.bfloat16, "cpu"), *expected(weight))


@given(st.sampled_from(ORDERS), st.booleans(), st.integers(0, 2**31))
@settings(max_examples=examples(30))
def test_a_shard_of_int4(order: str, run: bool, seed: int) -> None:
    """Shards of outputs and inputs: a slice, which is a view, or selected rows padded with zeros."""
    noise = torch.Generator().manual_seed(seed)
    weight = fuse_weights([int4(order, n, 256, 64, torch.float16, noise) for n in (64, 24)])
    rows = torch.arange(16, 56) if run else torch.cat((torch.arange(8, 24), torch.full((8,), -1), torch.arange(64, 88)))
    columns = torch.arange(64, 192) if run else torch.cat((torch.arange(32, 64), torch.full((32,), -1)))
    dense = F.pad(weight.dequantize(torch.float64), (0, 1, 0, 1))
    for part, want in (
        (weight.outputs(rows), dense[rows][:, :-1]),
        (weight.inputs(columns, 32), dense[:-1][:, columns]),
    ):
        assert isinstance(part, Int4Weight) and torch.equal(part.dequantize(torch.float64), want)
        same(pack(part, torch.bfloat16, "cpu"), *expected(part))


@given(st.integers(1, 70), st.integers(1, 70), st.sampled_from(KINDS), st.booleans(), st.integers(0, 2**31))
@settings(max_examples=examples(60))
def test_dense(n: int, k: int, kind: torch.dtype, wide: bool, seed: int) -> None:
    dense = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).to(kind)
    dtype = torch.float32 if wide else torch.bfloat16
    for rows in (dense, dense[n // 3 :, k // 3 :]):
        same(pack(DenseWeight(rows), dtype, "cpu"), blocks_of_dense(rows.to(dtype)))


@given(st.integers(1, 70), st.sampled_from([32, 64, 96, 256, 384]), st.sampled_from(KINDS), st.integers(0, 2**31))
@settings(max_examples=examples(40))
def test_rounded_to_int8(n: int, k: int, kind: torch.dtype, seed: int) -> None:
    """Quantises like Int8Weight, which the reference uses; with ties, zeros, large and small values."""
    noise = torch.Generator().manual_seed(seed)
    dense = torch.randn(n, k, generator=noise) * 10.0 ** torch.randint(-30, 30, (n, 1), generator=noise)
    dense[n // 2, : k // 2] = torch.arange(k // 2) - 63.5
    dense[n // 3] = 0
    rows = dense.to(kind)
    lazy, exact = LazyInt8Weight.of(rows), Int8Weight.of(rows)
    assert lazy is not None and exact is not None
    ours, theirs = pack(lazy, torch.bfloat16, "cpu"), pack(exact, torch.bfloat16, "cpu")
    same(ours, theirs.data, theirs.scales)
    some = torch.arange(n // 2, n)
    wanted = pack(exact.outputs(some), torch.bfloat16, "cpu")
    same(pack(lazy.outputs(some), torch.bfloat16, "cpu"), wanted.data, wanted.scales)


def test_packing_in_strips_equals_packing_the_whole_matrix() -> None:
    """A matrix that must be converted is converted in strips; together they equal the whole."""
    dense = torch.randn(4096 + 40, 32, generator=torch.Generator().manual_seed(1)).half()
    same(pack(DenseWeight(dense), torch.bfloat16, "cpu"), blocks_of_dense(dense.bfloat16()))
    ours, theirs = LazyInt8Weight.of(dense), Int8Weight.of(dense)
    assert ours is not None and theirs is not None
    wanted = pack(theirs, torch.bfloat16, "cpu")
    same(pack(ours, torch.bfloat16, "cpu"), wanted.data, wanted.scales)


def test_a_nan_affects_only_its_group() -> None:
    dense = torch.ones(16, 256)
    dense[3, 200] = torch.nan
    lazy = LazyInt8Weight.of(dense)
    assert lazy is not None
    scales = pack(lazy, torch.float32, "cpu").scales
    assert scales is not None and scales.isnan().nonzero().tolist() == [[0, 1, 3]]


def test_threads_pack_the_same() -> None:
    noise = torch.Generator().manual_seed(5)
    weights = [
        *(int4(order, 520, 256, 64, torch.float16, noise) for order in ORDERS),
        DenseWeight(torch.randn(520, 256)),
    ]
    alone = [pack(weight, torch.bfloat16, "cpu") for weight in weights]
    before = _C.threads()
    try:
        _C.set_threads(3)
        for weight, want in zip(weights, alone):
            same(pack(weight, torch.bfloat16, "cpu"), want.data, want.scales, want.zeros)
    finally:
        _C.set_threads(before)


def test_invalid_shapes_are_refused() -> None:
    words, scales = torch.zeros(32, 2, dtype=torch.int32), torch.zeros(1, 16)
    data, to_scales = torch.empty(1, 4, 16, dtype=torch.int32), torch.empty(1, 1, 16)
    to_zeros = torch.empty(1, 1, 16, dtype=torch.uint8)
    zeros = torch.zeros(1, 2, dtype=torch.int32)
    _C.pack_int4(words, scales, zeros, "outputs", 0, data, to_scales, to_zeros)
    for order, first, codes, error in (
        ("sideways", 0, words, "order"), ("outputs", 8, words, "do not fit the blocks"),
        ("outputs", 4, words, "outputs must be a multiple of 8"),
        ("outputs", 0, words[:12], "multiple of 8"), ("outputs", 0, words.T.contiguous().T, "not contiguous"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=error):
            _C.pack_int4(codes, scales, zeros, order, first, data, to_scales, to_zeros)
    with pytest.raises(ValueError, match="multiple of 8"):
        _C.pack_dense(torch.zeros(4, 12), torch.empty(1, 12, 16))


@given(st.integers(1, 2_100_000), st.data())
@settings(max_examples=examples(25))
def test_checksums_depend_on_every_bit(length: int, data: st.DataObject) -> None:
    some = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(length))
    before = _C.checksums(some)
    assert len(before) == 8 * -(-length // (1 << 20))
    for at in data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=4)):
        some[at] ^= 1 << data.draw(st.integers(0, 7))
        after = _C.checksums(some)
        piece = slice(8 * (at >> 20), 8 * (at >> 20) + 8)
        assert after[piece] != before[piece] and after[: piece.start] == before[: piece.start]
        before = after
    assert _C.checksums(some[:-1]) != before
