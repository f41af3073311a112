"""Weights of linear layers as a checkpoint holds them: dense, or four-bit groups. y = x W^T + b, W is [N, K].

Letters: N outputs, K inputs, g inputs per quantisation group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of an AutoAWQ "gemm" word holds this column of the eight
_PLAIN_ORDER = tuple(range(8))


def unpack_int4(words: Tensor, order: Sequence[int] = _PLAIN_ORDER) -> Tensor:
    """int32 [R, C/8] -> uint8 [R, C]; nibble i (from the low end) of a word holds its column order[i]."""
    shifts = torch.empty(8, dtype=torch.int32, device=words.device)
    shifts[list(order)] = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(-1) >> shifts).bitwise_and_(15)
    return codes.to(torch.uint8).flatten(1)


def pack_int4(codes: Tensor, order: Sequence[int] = _PLAIN_ORDER) -> Tensor:
    """The inverse of `unpack_int4`: uint8 [R, C] in 0..15 -> int32 [R, C/8]."""
    groups = codes.view(codes.shape[0], -1, 8)
    words = torch.zeros(groups.shape[:2], dtype=torch.int32, device=codes.device)
    for nibble, column in enumerate(order):
        words |= groups[:, :, column].to(torch.int32) << (4 * nibble)
    return words


def _select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """x.index_select(dim, index), and zeros where the index is -1."""
    chosen = x.index_select(dim, index.clamp_min(0))
    missing = (index < 0).nonzero().squeeze(1)
    return chosen.index_fill_(dim, missing, 0) if missing.numel() else chosen


def _runs(index: Tensor, width: int) -> Tensor:
    """The numbers of the aligned runs of `width` that an index is made of; -1 where it is all -1."""
    rows = index.view(-1, width)
    runs = rows[:, 0] // width
    whole = torch.where(runs.unsqueeze(1) < 0, -1, runs.unsqueeze(1) * width + torch.arange(width))
    assert torch.equal(rows, whole), f"not made of aligned runs of {width}"
    return runs


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A floating-point matrix."""

    weight: Tensor  # [N, K]
    bias: Tensor | None = None  # [N]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[N, K] in `dtype`."""
        return self.weight.to(dtype)

    def outputs(self, index: Tensor) -> DenseWeight:
        """The rows `index` [n] int64 of matrix and bias, zeros where it is -1."""
        bias = None if self.bias is None else _select(self.bias, 0, index)
        return DenseWeight(_select(self.weight, 0, index), bias)

    def inputs(self, index: Tensor, run: int) -> DenseWeight:
        """The columns `index` [k] int64, zeros where it is -1; the bias stays. `run` matters to int4 only."""
        return DenseWeight(_select(self.weight, 1, index), self.bias)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A four-bit matrix in one layout, whichever file it came from: packed along N, K outside, plain order.

    So a shard along N takes columns of every tensor (by eights), one along K rows (by groups).
    """

    packed: Tensor  # [K, N/8] int32, nibble i of word c is column 8c + i
    scales: Tensor  # [K/g, N]
    zeros: Tensor  # [K/g, N/8] int32, packed like the codes
    group_size: int
    bias: Tensor | None = None  # [N]

    @staticmethod
    def from_awq(
        qweight: Tensor, qzeros: Tensor, scales: Tensor, group_size: int, bias: Tensor | None = None
    ) -> Int4Weight:
        """AutoAWQ "gemm": qweight [K, N/8], qzeros [K/g, N/8], scales [K/g, N] (kernels.md, section F)."""
        packed = pack_int4(unpack_int4(qweight, AWQ_ORDER))
        return Int4Weight(packed, scales, pack_int4(unpack_int4(qzeros, AWQ_ORDER)), group_size, bias)

    @staticmethod
    def from_pack_quantized(
        packed: Tensor, scale: Tensor, zero_point: Tensor | None, group_size: int, bias: Tensor | None = None
    ) -> Int4Weight:
        """compressed-tensors: packed [N, K/8], scale [N, K/g], zero_point [N/8, K/g] or None.

        Codes and zero points are signed there and stored with 8 added; the 8 falls out of q - z.
        """
        codes = unpack_int4(packed).T.contiguous()
        scales = scale.T.contiguous()
        if zero_point is None:
            zeros = torch.full(scales.shape, 8, dtype=torch.uint8, device=scales.device)
        else:  # packed along N, which is its first dimension
            zeros = unpack_int4(zero_point.T.contiguous())
        return Int4Weight(pack_int4(codes), scales, pack_int4(zeros), group_size, bias)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[N, K] in `dtype`: (q - z) * s, rounded once."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        codes = unpack_int4(self.packed).to(wide).unflatten(0, (-1, self.group_size))
        zeros = unpack_int4(self.zeros).to(wide).unsqueeze(1)
        weight = codes.sub_(zeros).mul_(self.scales.to(wide).unsqueeze(1))
        return weight.flatten(0, 1).T.contiguous().to(dtype)

    def outputs(self, index: Tensor) -> Int4Weight:
        """The rows `index` [n] int64 of matrix and bias, zeros where it is -1, in aligned eights."""
        eights = _runs(index, 8)
        packed, zeros = _select(self.packed, 1, eights), _select(self.zeros, 1, eights)
        bias = None if self.bias is None else _select(self.bias, 0, index)
        return Int4Weight(packed, _select(self.scales, 1, index), zeros, self.group_size, bias)

    def inputs(self, index: Tensor, run: int) -> Int4Weight:
        """The columns `index` [k] int64, zeros where it is -1, in aligned runs of `run`; the bias stays.

        Where a run is not made of whole quantisation groups (heads narrower than a group) the groups become smaller.
        """
        weight = self.regroup(math.gcd(self.group_size, run))
        groups = _runs(index, weight.group_size)
        scales, zeros = _select(weight.scales, 0, groups), _select(weight.zeros, 0, groups)
        return Int4Weight(_select(weight.packed, 0, index), scales, zeros, weight.group_size, self.bias)

    def regroup(self, group_size: int) -> Int4Weight:
        """The same matrix in smaller groups, several of which have the same scale and zero point."""
        times, rest = divmod(self.group_size, group_size)
        assert rest == 0
        if times == 1:
            return self
        scales, zeros = (x.repeat_interleave(times, 0) for x in (self.scales, self.zeros))
        return replace(self, scales=scales, zeros=zeros, group_size=group_size)


Weight = DenseWeight | Int4Weight


def fuse(parts: Sequence[Weight]) -> Weight:
    """One matrix that computes all of `parts` on the same input: joined along N. All or none have a bias."""
    biases = [part.bias for part in parts if part.bias is not None]
    assert len(biases) in (0, len(parts))
    bias = torch.cat(biases) if biases else None
    int4 = [part for part in parts if isinstance(part, Int4Weight)]
    if len(int4) == len(parts):
        packed = torch.cat([part.packed for part in int4], 1)
        scales = torch.cat([part.scales for part in int4], 1)
        return Int4Weight(packed, scales, torch.cat([p.zeros for p in int4], 1), int4[0].group_size, bias)
    # where only some were left dense, the matrix is dense
    dtype = next(part.weight.dtype for part in parts if isinstance(part, DenseWeight))
    return DenseWeight(torch.cat([part.dequantize(dtype) for part in parts]), bias)
