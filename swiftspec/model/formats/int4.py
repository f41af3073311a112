"""Int4 weights: w = (q - z) * s, with one scale and one zero point per group of g inputs.

Letters: N outputs, K inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from swiftspec.errors import UserError
from swiftspec.model.checkpoint import Source
from swiftspec.model.formats.activation_quantization import quantized_matmul
from swiftspec.model.weights import select

GROUP_SIZES = (32, 64, 128)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of an int32 holds this one of its eight columns
Order = Literal["outputs", "awq", "inputs"]
_IN_ORDER = tuple(range(8))


def check(method: str, bits: int, group_size: int) -> int:
    """Returns the group size. Raises UserError if it or the number of bits is not supported."""
    if bits != 4:
        raise UserError(f"{method} with {bits} bits is not supported; only 4 is")
    if group_size not in GROUP_SIZES:
        raise UserError(f"{method} with group size {group_size} is not supported; 32, 64 and 128 are")
    return group_size


def groups(tensors: Source, module: str, rows: int, columns: int, group_size: int) -> int:
    """Number of groups of a matrix's inputs. Raises UserError if the matrix does not divide into groups."""
    if rows % 8 or columns % group_size:
        raise UserError(f"{tensors.folder}: {module} [{rows}, {columns}] does not divide into int4 groups")
    return columns // group_size


def unpack_int4(words: Tensor, order: Sequence[int] = _IN_ORDER) -> Tensor:
    """int32 [R, C/8] -> uint8 [R, C]; nibble i (from the low end) of an int32 contains column order[i]."""
    shifts = torch.empty(8, dtype=torch.int32, device=words.device)
    shifts[list(order)] = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(-1) >> shifts).bitwise_and_(15)
    return codes.to(torch.uint8).flatten(1)


def pack_int4(codes: Tensor, order: Sequence[int] = _IN_ORDER) -> Tensor:
    """The inverse of `unpack_int4`: uint8 [R, C] in 0..15 -> int32 [R, C/8]."""
    groups = codes.view(codes.shape[0], -1, 8)
    words = torch.zeros(groups.shape[:2], dtype=torch.int32, device=codes.device)
    for nibble, column in enumerate(order):
        words |= groups[:, :, column].to(torch.int32) << (4 * nibble)
    return words


def _runs(index: Tensor, width: int) -> Tensor:
    """Indices of the aligned runs of length `width` that `index` consists of; -1 for runs of -1."""
    rows = index.view(-1, width)
    runs = rows[:, 0] // width
    whole = torch.where(runs.unsqueeze(1) < 0, -1, runs.unsqueeze(1) * width + torch.arange(width))
    assert torch.equal(rows, whole), f"not made of aligned runs of {width}"
    return runs


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """Int4 matrix in the packed layout of its file, so that loading computes nothing before `pack`.

    `order`: layout of the tensors. "outputs": packed along N, with K outside, as the field comments describe; a shard
    of the outputs is a range of columns of every tensor (in groups of eight), a shard of the inputs a range of rows (in
    quantisation groups). "awq": the same, but nibble i of an int32 is output 8c + AWQ_ORDER[i]. "inputs": packed [N,
    K/8], scales [N, K/g], zeros [N/8, K/g], where an int32 has eight consecutive inputs or outputs.
    """

    packed: Tensor  # [K, N/8] int32, nibble i of column c is output 8c + i
    scales: Tensor  # [K/g, N]
    zeros: Tensor  # [K/g, N/8] int32, packed like the codes
    group_size: int
    bias: Tensor | None = None  # [N], including the outputs in `rest`
    rounds: bool = False  # whether activations are quantised to int8 for the product
    order: Order = "outputs"
    rest: tuple[Int4Weight, ...] = ()  # matrices with further outputs, in the same `order`

    @staticmethod
    def of(dense: Tensor, group: int, bias: Tensor | None = None) -> Int4Weight:
        """Quantises a dense matrix [N, K], where N is a multiple of 8 and K of `group`. The codes of a group span its
        minimum (at most 0) to its maximum (at least 0)."""
        outputs, inputs = dense.shape
        packed = torch.empty(outputs, inputs // 8, dtype=torch.int32)
        scales = torch.empty(outputs, inputs // group, dtype=torch.bfloat16)
        zeros = torch.empty(outputs // 8, inputs // group, dtype=torch.int32)
        for start in range(0, outputs, 4096):  # in parts, because intermediates are float32
            part, rows = dense[start : start + 4096].float().unflatten(1, (-1, group)), slice(start, start + 4096)
            low, high = part.amin(2).clamp_max_(0), part.amax(2).clamp_min_(0)
            scales[rows] = scale = ((high - low) / 15).to(torch.bfloat16)
            inverse = torch.where(scale == 0, 0.0, 1 / scale.float())
            zero = (-low * inverse).round_().clamp_(0, 15)
            codes = (part * inverse.unsqueeze(2)).round_().add_(zero.unsqueeze(2)).clamp_(0, 15)
            packed[rows] = pack_int4(codes.flatten(1).to(torch.uint8))
            zeros[start // 8 : start // 8 + len(part) // 8] = pack_int4(zero.T.to(torch.uint8)).T
        return Int4Weight(packed, scales, zeros, group, bias, order="inputs")

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        rows, words = self.packed.shape
        outputs, inputs = (rows, 8 * words) if self.order == "inputs" else (8 * words, rows)
        return outputs + sum(part.shape[0] for part in self.rest), inputs

    @property
    def _across(self) -> int:
        """The dimension of the outputs."""
        return 0 if self.order == "inputs" else 1

    @property
    def parts(self) -> tuple[Int4Weight, ...]:
        """The parts of the matrix along the outputs, each with an empty `rest`."""
        return (replace(self, rest=(), bias=None), *self.rest)

    def joined(self) -> Int4Weight:
        """The same matrix with an empty `rest`."""
        if not self.rest:
            return self
        tensors = zip(*((part.packed, part.scales, part.zeros) for part in self.parts))
        packed, scales, zeros = (torch.cat(parts, self._across) for parts in tensors)
        return replace(self, packed=packed, scales=scales, zeros=zeros, rest=())

    def to(self, device: torch.device | str) -> Int4Weight:
        """The same matrix on a device."""
        packed, scales, zeros = (tensor.to(device) for tensor in (self.packed, self.scales, self.zeros))
        return replace(
            self, packed=packed, scales=scales, zeros=zeros, rest=tuple(part.to(device) for part in self.rest)
        )

    def plain(self) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [K, N] uint8, scales [K/g, N] and zeros [K/g, N] uint8."""
        weight = self.joined()
        order = AWQ_ORDER if self.order == "awq" else _IN_ORDER
        if self.order == "inputs":
            return unpack_int4(weight.packed).T, weight.scales.T, unpack_int4(weight.zeros.T)
        return unpack_int4(weight.packed, order), weight.scales, unpack_int4(weight.zeros, order)

    def in_order(self) -> Int4Weight:
        """The same matrix in the order "outputs", with an empty `rest`."""
        weight = self.joined()
        if weight.order == "outputs":
            return weight
        codes, scales, zeros = weight.plain()
        packed, zeros = pack_int4(codes.contiguous()), pack_int4(zeros.contiguous())
        return replace(weight, packed=packed, scales=scales.contiguous(), zeros=zeros, order="outputs")

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[N, K] in `dtype`: (q - z) * s, rounded once."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        codes, scales, zeros = self.plain()
        weight = codes.to(wide, copy=True).unflatten(0, (-1, self.group_size))
        weight.sub_(zeros.to(wide).unsqueeze(1)).mul_(scales.to(wide).unsqueeze(1))
        return weight.flatten(0, 1).T.contiguous().to(dtype)

    def product(self, device: torch.device | str) -> Callable[[Tensor], Tensor] | None:
        """See `Weight.product`."""
        if not self.rounds:
            return None
        codes, scales, zeros = (tensor.to(device, torch.float32).contiguous() for tensor in self.plain())
        codes = codes.unflatten(0, (-1, self.group_size))
        bias = None if self.bias is None else self.bias.to(device, torch.float32)
        return partial(quantized_matmul, codes=codes, scales=scales, zeros=zeros, bias=bias)

    def outputs(self, index: Tensor) -> Int4Weight:
        """See `Weight.outputs`; the index consists of aligned runs of eight."""
        weight, across, eights = self.joined(), self._across, _runs(index, 8)
        packed = select(weight.packed, across, index if self.order == "inputs" else eights)
        scales, zeros = select(weight.scales, across, index), select(weight.zeros, across, eights)
        bias = None if self.bias is None else select(self.bias, 0, index)
        return replace(weight, packed=packed, scales=scales, zeros=zeros, bias=bias)

    def inputs(self, index: Tensor, run: int) -> Int4Weight:
        """See `Weight.inputs`. If a run is not a multiple of the group size, because heads are smaller than a group,
        the groups are split."""
        weight, down = self.joined().regroup(math.gcd(self.group_size, run)), 1 - self._across
        groups = _runs(index, weight.group_size)
        packed = select(weight.packed, down, _runs(index, 8) if self.order == "inputs" else index)
        scales, zeros = select(weight.scales, down, groups), select(weight.zeros, down, groups)
        return replace(weight, packed=packed, scales=scales, zeros=zeros)

    def stack(self, others: Sequence[Int4Weight], bias: Tensor | None) -> Int4Weight:
        first, *rest = (part for weight in (self, *others) for part in weight.parts)
        return replace(first, rest=tuple(rest), bias=bias)

    def regroup(self, group_size: int) -> Int4Weight:
        """The same matrix in smaller groups, with repeated scales and zero points."""
        times, rest = divmod(self.group_size, group_size)
        assert rest == 0
        if times == 1:
            return self
        weight, down = self.joined(), 1 - self._across
        scales, zeros = (x.repeat_interleave(times, down) for x in (weight.scales, weight.zeros))
        return replace(weight, scales=scales, zeros=zeros, group_size=group_size)
