"""Int4 weights: both file layouts against the formula, a round trip, and concatenation along N."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from swiftspec.model.formats.awq import from_awq
from swiftspec.model.formats.compressed_tensors import from_pack_quantized
from swiftspec.model.formats.int4 import AWQ_ORDER, Int4Weight, pack_int4, unpack_int4
from swiftspec.model.weights import DenseWeight, Weight, fuse_weights
from tests.support.cases import examples

DATA = Path(__file__).parents[1] / "data"  # written and unpacked by autoawq and compressed-tensors themselves
sizes = st.tuples(st.integers(1, 3), st.sampled_from([32, 64]), st.integers(1, 4), st.integers(0, 2**31))


class Drawn:
    """Random codes [K, N], zero points [K/g, N], scales [K/g, N], and the matrix [N, K] that they represent."""

    def __init__(self, groups: int, group_size: int, eights: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.group_size, shape = group_size, (groups, 8 * eights)
        self.codes = random.integers(0, 16, (groups * group_size, 8 * eights))
        self.zeros = random.integers(0, 16, shape)
        self.scales = random.normal(size=shape).astype(np.float16)

    def matrix(self, zeros: NDArray[np.int64] | None = None) -> Tensor:
        wide = [np.repeat(x, self.group_size, 0) for x in (self.zeros if zeros is None else zeros, self.scales)]
        return torch.from_numpy(((self.codes - wide[0]) * wide[1].astype(np.float64)).T.copy())


def words(codes: NDArray[np.int64], order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Packs along the last axis, one nibble after another."""
    out = np.zeros((codes.shape[0], codes.shape[1] // 8), dtype=np.uint32)
    for word in range(out.shape[1]):
        for nibble, column in enumerate(order):
            out[:, word] |= codes[:, 8 * word + column].astype(np.uint32) << np.uint32(4 * nibble)
    return torch.from_numpy(out.view(np.int32))


def awq(drawn: Drawn, bias: Tensor | None = None) -> Int4Weight:
    scales = torch.from_numpy(drawn.scales)
    qweight, qzeros = words(drawn.codes, AWQ_ORDER), words(drawn.zeros, AWQ_ORDER)
    return from_awq(qweight, qzeros, scales, drawn.group_size, bias)


@given(sizes)
@settings(max_examples=examples(20))
def test_packing_is_a_round_trip(size: tuple[int, int, int, int]) -> None:
    codes = Drawn(*size).codes
    for order in (AWQ_ORDER, tuple(range(8))):
        packed = pack_int4(torch.from_numpy(codes).to(torch.uint8), order)
        assert torch.equal(packed, words(codes, order))
        assert np.array_equal(unpack_int4(packed, order).numpy(), codes)


@given(sizes)
@settings(max_examples=examples(20))
def test_awq_gemm(size: tuple[int, int, int, int]) -> None:
    drawn = Drawn(*size)
    weight = awq(drawn)
    assert torch.equal(weight.dequantize(torch.float64), drawn.matrix())
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.equal(weight.dequantize(dtype), drawn.matrix().float().to(dtype))


@given(sizes, st.booleans())
@settings(max_examples=examples(20))
def test_pack_quantized(size: tuple[int, int, int, int], symmetric: bool) -> None:
    drawn = Drawn(*size)
    packed = words(np.ascontiguousarray(drawn.codes.T))
    scale = torch.from_numpy(drawn.scales.T.copy())
    zeros = None if symmetric else words(drawn.zeros).T.contiguous()
    weight = from_pack_quantized(packed, scale, zeros, drawn.group_size)
    want = drawn.matrix(np.full_like(drawn.zeros, 8) if symmetric else None)
    assert torch.equal(weight.dequantize(torch.float64), want)


def test_both_layouts_give_the_same_weights() -> None:
    drawn = Drawn(2, 32, 3, 5)
    scale, zeros = torch.from_numpy(drawn.scales.T.copy()), words(drawn.zeros).T.contiguous()
    other = from_pack_quantized(words(np.ascontiguousarray(drawn.codes.T)), scale, zeros, 32)
    one, other = awq(drawn).in_order(), other.in_order()
    assert torch.equal(one.packed, other.packed) and torch.equal(one.zeros, other.zeros)
    assert torch.equal(one.scales, other.scales) and one.group_size == other.group_size
    assert torch.equal(one.packed, words(drawn.codes)) and torch.equal(one.zeros, words(drawn.zeros))


@given(st.sampled_from([32, 64, 128]), st.integers(1, 3), st.integers(0, 2**31), st.booleans())
@settings(max_examples=examples(20))
def test_a_dense_matrix_rounded(group: int, groups: int, seed: int, one_sided: bool) -> None:
    """The error of each number is at most half a step of its group, plus the rounding of the scale to bfloat16; zeros
    are exact."""
    random = torch.Generator().manual_seed(seed)
    matrix = torch.randn(16, groups * group, generator=random)
    matrix = matrix.abs() + 3 if one_sided else matrix
    matrix[3] = 0
    got = Int4Weight.of(matrix.bfloat16(), group, torch.arange(16.0))
    assert got.shape == (16, groups * group) and got.bias is not None
    parts = matrix.bfloat16().float().unflatten(1, (-1, group))
    step = (parts.amax(2).clamp_min(0) - parts.amin(2).clamp_max(0)) / 15
    error = (got.dequantize(torch.float32).unflatten(1, (-1, group)) - parts).abs().amax(2)
    assert (error <= 0.57 * step + 1e-12).all()
    assert not got.dequantize(torch.float32)[3].any()
    half = got.outputs(torch.arange(8, 16))
    assert torch.equal(half.dequantize(torch.float32), got.dequantize(torch.float32)[8:])


def dense(weight: Weight) -> Tensor:
    return weight.dequantize(torch.float64)


def test_fusing() -> None:
    parts = [awq(Drawn(2, 32, eights, eights), torch.randn(8 * eights)) for eights in (1, 2, 3)]
    joined = fuse_weights(parts)
    assert isinstance(joined, Int4Weight) and joined.bias is not None
    assert torch.equal(dense(joined), torch.cat([dense(part) for part in parts]))
    assert torch.equal(joined.bias, torch.cat([part.bias for part in parts if part.bias is not None]))
    plain = [DenseWeight(torch.randn(rows, 64)) for rows in (8, 3)]
    assert (
        torch.equal(dense(fuse_weights(plain)), torch.cat([dense(part) for part in plain]))
        and fuse_weights(plain).bias is None
    )


def test_fusing_dense_with_quantised_weights() -> None:
    parts: list[Weight] = [awq(Drawn(2, 32, 1, 1)), DenseWeight(torch.randn(5, 64, dtype=torch.float64))]
    joined = fuse_weights(parts)
    assert isinstance(joined, DenseWeight)
    assert torch.equal(dense(joined), torch.cat([dense(part) for part in parts]))


def test_biases_of_only_some_parts_are_refused() -> None:
    with pytest.raises(AssertionError):
        fuse_weights([DenseWeight(torch.randn(2, 4), torch.randn(2)), DenseWeight(torch.randn(2, 4))])


@given(sizes, st.sampled_from([8, 16, 32, 64]), st.data())
@settings(max_examples=examples(40))
def test_selecting(size: tuple[int, int, int, int], run: int, data: st.DataObject) -> None:
    """Outputs in groups of eight and runs of inputs, with zeros for index -1: the int4 matrix gives the same as the
    dense one."""
    drawn = Drawn(*size)
    n, k = drawn.matrix().shape
    bias = torch.randn(n, dtype=torch.float64)
    weight, dense_twin = awq(drawn, bias), DenseWeight(drawn.matrix(), bias)
    eights = data.draw(st.lists(st.integers(-1, n // 8 - 1), min_size=1, max_size=6))
    runs = data.draw(st.lists(st.integers(-1, k // run - 1), min_size=1, max_size=6))
    rows, columns = (
        torch.cat([torch.arange(i * wide, (i + 1) * wide) if i >= 0 else torch.full((wide,), -1) for i in picked])
        for picked, wide in ((eights, 8), (runs, run))
    )
    padded = torch.nn.functional.pad(drawn.matrix(), (0, 1, 0, 1))  # index -1 selects the zeros at the end
    for whole in (weight, dense_twin):
        some = whole.outputs(rows)
        assert torch.equal(dense(some), padded[rows][:, :-1])
        assert some.bias is not None and torch.equal(some.bias, torch.nn.functional.pad(bias, (0, 1))[rows])
        some = whole.inputs(columns, run)
        assert torch.equal(dense(some), padded[:-1][:, columns]) and some.bias is bias
    part = weight.inputs(columns, run)
    assert isinstance(part, Int4Weight) and part.group_size == min(run, drawn.group_size)


def test_selections_that_no_kernel_supports_are_refused() -> None:
    weight = awq(Drawn(2, 32, 2, 1))
    for rows in (torch.arange(4, 12), torch.tensor([0, 1, 2, 3, 4, 5, 6, -1]), torch.arange(7, -1, -1)):
        with pytest.raises(AssertionError, match="aligned runs of 8"):
            weight.outputs(rows)
    with pytest.raises(AssertionError, match="aligned runs of 32"):
        weight.inputs(torch.arange(16, 48), 32)
    part = weight.inputs(torch.arange(16, 48), 16)
    assert isinstance(part, Int4Weight) and part.group_size == 16
    assert weight.regroup(32) is weight and torch.equal(dense(weight.regroup(4)), dense(weight))


def test_a_checkpoint_written_by_autoawq() -> None:
    tensors = load_file(DATA / "awq_gemm_tiny" / "model.safetensors")
    unpacked = load_file(DATA / "awq_gemm_tiny" / "dequantized.safetensors")  # [K, N]
    assert len(unpacked) == 14
    for name, want in unpacked.items():
        qweight, qzeros, scales = (tensors[name.replace("weight", x)] for x in ("qweight", "qzeros", "scales"))
        weight = from_awq(qweight, qzeros, scales, 128)
        assert torch.equal(weight.dequantize(torch.float16), want.T)


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_a_checkpoint_written_by_compressed_tensors(kind: str) -> None:
    tensors = load_file(DATA / "compressed_tensors_tiny" / kind / "model.safetensors")
    unpacked = load_file(DATA / "compressed_tensors_tiny" / kind / "dequantized.safetensors")  # [K, N]
    assert len(unpacked) == 14
    for name, want in unpacked.items():
        zeros = tensors.get(f"{name}_zero_point")
        assert (zeros is None) == (kind == "symmetric")
        weight = from_pack_quantized(tensors[f"{name}_packed"], tensors[f"{name}_scale"], zeros, 128)
        assert torch.equal(weight.dequantize(torch.bfloat16), want.T)
