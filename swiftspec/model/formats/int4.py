"""Int4 weights: w = (q - z) * s, where each output has one scale s and one zero point z per group of inputs."""

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
from swiftspec.model.weights import DenseWeight, select

GROUP_SIZES = (32, 64, 128)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of an int32 contains column AWQ_ORDER[i] of its eight
Order = Literal["outputs", "awq", "inputs", "gptq"]
BY_INPUTS = ("inputs", "gptq")  # orders in which an int32 contains inputs
_IN_ORDER = tuple(range(8))


def check(method: str, bits: int, group_size: int) -> int:
    """Returns `group_size`. Raises UserError if it or the number of bits is not supported. `method`: named in the
    error."""
    if bits != 4:
        raise UserError(f"{method} with {bits} bits is not supported; only 4 is")
    if group_size not in GROUP_SIZES:
        raise UserError(f"{method} with group size {group_size} is not supported; 32, 64 and 128 are")
    return group_size


def groups(tensors: Source, module: str, rows: int, columns: int, group_size: int) -> int:
    """Returns the number of groups that the inputs of the matrix [rows, columns] of `module` have. Raises UserError if
    `group_size` does not divide the columns, or 8 the rows."""
    if rows % 8 or columns % group_size:
        raise UserError(f"{tensors.folder}: {module} [{rows}, {columns}] cannot be divided into int4 groups")
    return columns // group_size


def unpack_int4(words: Tensor, order: Sequence[int] = _IN_ORDER) -> Tensor:
    """Unpacks int4 codes: int32 [rows, columns / 8] -> uint8 [rows, columns]. Nibble i (0: the lowest) of an int32
    contains column order[i] of its eight."""
    shifts = torch.empty(8, dtype=torch.int32, device=words.device)
    shifts[list(order)] = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(-1) >> shifts).bitwise_and_(15)
    return codes.to(torch.uint8).flatten(1)


def pack_int4(codes: Tensor, order: Sequence[int] = _IN_ORDER) -> Tensor:
    """Packs int4 codes, the inverse of `unpack_int4`: uint8 [rows, columns] in 0..15 -> int32 [rows, columns / 8]."""
    groups = codes.view(codes.shape[0], -1, 8)
    words = torch.zeros(groups.shape[:2], dtype=torch.int32, device=codes.device)
    for nibble, column in enumerate(order):
        words |= groups[:, :, column].to(torch.int32) << (4 * nibble)
    return words


def _runs(index: Tensor, width: int) -> Tensor:
    """Returns the index of each run of `index`, which consists of runs of `width` consecutive numbers that start at a
    multiple of `width`, or of runs of -1, whose index is -1."""
    rows = index.view(-1, width)
    runs = rows[:, 0] // width
    whole = torch.where(runs.unsqueeze(1) < 0, -1, runs.unsqueeze(1) * width + torch.arange(width))
    assert torch.equal(rows, whole), f"not made of aligned runs of {width}"
    return runs


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """Int4 matrix in the layout of its checkpoint, which is converted only when a backend packs it. In shapes, groups =
    inputs / `group_size`.

    `order`: layout of the tensors.
    "outputs": as the field comments describe, with eight outputs per int32.
    "awq": like "outputs", but nibble i of column c is output 8c + AWQ_ORDER[i].
    "inputs": packed [outputs, inputs / 8] with eight consecutive inputs per int32, scales [outputs, groups], zeros
    [outputs / 8, groups] with eight consecutive outputs per int32.
    "gptq": packed [inputs / 8, outputs] with eight consecutive inputs per int32, scales and zeros as in "outputs".
    """

    packed: Tensor  # [inputs, outputs / 8] int32, nibble i of column c is the code of output 8c + i
    scales: Tensor  # [groups, outputs]
    zeros: Tensor  # [groups, outputs / 8] int32, packed like the codes
    group_size: int  # inputs per group
    bias: Tensor | None = None  # [outputs], including the outputs in `rest`
    int8_activations: int = 0  # int8 numbers to which the product quantises an activation: 0, 1 or 2
    order: Order = "outputs"
    rest: tuple[Int4Weight, ...] = ()  # matrices with further outputs, in the same `order`
    permutation: Tensor | None = None  # [inputs] int64: input i of the matrix multiplies x[permutation[i]]; None: x[i]

    @staticmethod
    def of(dense: Tensor, group: int, bias: Tensor | None = None) -> Int4Weight:
        """Quantises a dense matrix [outputs, inputs]; outputs must be a multiple of 8, inputs of `group`. The codes
        0..15 of a group represent values from min(smallest, 0) to max(largest, 0)."""
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
        """(outputs, inputs), including the outputs in `rest`."""
        rows, columns = self.packed.shape
        outputs, inputs = 8 * columns, rows
        if self.order == "inputs":
            outputs, inputs = rows, 8 * columns
        elif self.order == "gptq":
            outputs, inputs = columns, 8 * rows
        return outputs + sum(part.shape[0] for part in self.rest), inputs

    @property
    def _across(self) -> int:
        """The dimension of `packed`, `scales` and `zeros` along which outputs lie."""
        return 0 if self.order == "inputs" else 1

    @property
    def parts(self) -> tuple[Int4Weight, ...]:
        """The matrix divided along the outputs: this one and those in `rest`, each without bias and with an empty
        `rest`."""
        return (replace(self, rest=(), bias=None), *self.rest)

    def joined(self) -> Int4Weight:
        """Returns the same matrix with an empty `rest`, whose tensors are concatenated to its own."""
        if not self.rest:
            return self
        tensors = zip(*((part.packed, part.scales, part.zeros) for part in self.parts))
        packed, scales, zeros = (torch.cat(parts, self._across) for parts in tensors)
        return replace(self, packed=packed, scales=scales, zeros=zeros, rest=())

    def to(self, device: torch.device | str) -> Int4Weight:
        """Returns the matrix with codes, scales and zero points on `device`. The bias is not copied."""
        packed, scales, zeros = (tensor.to(device) for tensor in (self.packed, self.scales, self.zeros))
        return replace(
            self, packed=packed, scales=scales, zeros=zeros, rest=tuple(part.to(device) for part in self.rest)
        )

    def unpack(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns codes [inputs, outputs] uint8, scales [groups, outputs] and zero points [groups, outputs] uint8."""
        weight = self.joined()
        order = AWQ_ORDER if self.order == "awq" else _IN_ORDER
        if self.order == "inputs":
            return unpack_int4(weight.packed).T, weight.scales.T, unpack_int4(weight.zeros.T)
        if self.order == "gptq":
            return unpack_int4(weight.packed.T).T, weight.scales, unpack_int4(weight.zeros)
        return unpack_int4(weight.packed, order), weight.scales, unpack_int4(weight.zeros, order)

    def in_order(self) -> Int4Weight:
        """Returns the same matrix in the order "outputs", with an empty `rest`."""
        weight = self.joined()
        if weight.order == "outputs":
            return weight
        codes, scales, zeros = weight.unpack()
        packed, zeros = pack_int4(codes.contiguous()), pack_int4(zeros.contiguous())
        return replace(weight, packed=packed, scales=scales.contiguous(), zeros=zeros, order="outputs")

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns the dense matrix [outputs, inputs] in `dtype`: (q - z) * s, rounded once, for the inputs in their
        original order."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        codes, scales, zeros = self.unpack()
        weight = codes.to(wide, copy=True).unflatten(0, (-1, self.group_size))
        weight.sub_(zeros.to(wide).unsqueeze(1)).mul_(scales.to(wide).unsqueeze(1))
        rows = weight.flatten(0, 1)
        if self.permutation is not None:
            rows = torch.empty_like(rows).index_copy_(0, self.permutation, rows)
        return rows.T.contiguous().to(dtype)

    def product(self, device: torch.device | str) -> Callable[[Tensor], Tensor] | None:
        """Returns the product with int8 activations, or None if `int8_activations` is not set; see `Weight.product`."""
        parts = int(self.int8_activations)
        if parts == 0:
            return None
        codes, scales, zeros = (tensor.to(device, torch.float32).contiguous() for tensor in self.unpack())
        codes = codes.unflatten(0, (-1, self.group_size))
        bias = None if self.bias is None else self.bias.to(device, torch.float32)
        product = partial(quantized_matmul, codes=codes, scales=scales, zeros=zeros, bias=bias, parts=parts)
        if self.permutation is None:
            return product
        order = self.permutation.to(device)
        return lambda x: product(x.index_select(1, order))

    def outputs(self, index: Tensor) -> Int4Weight:
        """See `Weight.outputs`. `index` consists of runs of eight outputs that start at a multiple of eight."""
        weight, across, eights = self.joined(), self._across, _runs(index, 8)
        packed = select(weight.packed, across, index if self.order in BY_INPUTS else eights)
        scales, zeros = select(weight.scales, across, index), select(weight.zeros, across, eights)
        bias = None if self.bias is None else select(self.bias, 0, index)
        return replace(weight, packed=packed, scales=scales, zeros=zeros, bias=bias)

    def inputs(self, index: Tensor, run: int) -> Int4Weight | DenseWeight:
        """See `Weight.inputs`. If a run is not a multiple of the group size, because heads are smaller than a group,
        the groups are split. A permuted matrix becomes dense, because its runs have inputs of many groups."""
        if self.permutation is not None:
            return DenseWeight(self.dequantize(torch.float32), self.bias).inputs(index, run)
        weight, down = self.joined().regroup(math.gcd(self.group_size, run)), 1 - self._across
        groups = _runs(index, weight.group_size)
        packed = select(weight.packed, down, _runs(index, 8) if self.order in BY_INPUTS else index)
        scales, zeros = select(weight.scales, down, groups), select(weight.zeros, down, groups)
        return replace(weight, packed=packed, scales=scales, zeros=zeros)

    def stack(self, others: Sequence[Int4Weight], bias: Tensor | None) -> Int4Weight | DenseWeight:
        """See `Weight.stack`. Matrices with different permutations become a dense one."""
        first, *rest = (part for weight in (self, *others) for part in weight.parts)
        if not all(_same(first.permutation, part.permutation) for part in rest):
            return DenseWeight(torch.cat([part.dequantize(torch.float32) for part in (first, *rest)]), bias)
        return replace(first, rest=tuple(rest), bias=bias)

    def regroup(self, group_size: int) -> Int4Weight:
        """Returns the same matrix in smaller groups, with repeated scales and zero points. `group_size` must divide the
        present one."""
        times, rest = divmod(self.group_size, group_size)
        assert rest == 0
        if times == 1:
            return self
        weight, down = self.joined(), 1 - self._across
        scales, zeros = (x.repeat_interleave(times, down) for x in (weight.scales, weight.zeros))
        return replace(weight, scales=scales, zeros=zeros, group_size=group_size)
