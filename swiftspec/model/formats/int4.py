"""Four-bit weights: w = (q - z) * s, with one scale and one zero point for each group of g inputs.

Letters: N outputs, K inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from swiftspec.errors import UserError
from swiftspec.model.checkpoint import Source
from swiftspec.model.formats.rounding import rounded_product
from swiftspec.model.weights import select

GROUP_SIZES = (32, 64, 128)
_IN_ORDER = tuple(range(8))


def check(method: str, bits: int, group_size: int) -> int:
    """The group size. Raises UserError where it or the number of bits is not supported."""
    if bits != 4:
        raise UserError(f"{method} with {bits} bits is not supported; only 4 is")
    if group_size not in GROUP_SIZES:
        raise UserError(f"{method} with group size {group_size} is not supported; 32, 64 and 128 are")
    return group_size


def groups(tensors: Source, module: str, rows: int, columns: int, group_size: int) -> int:
    """Groups of a matrix's inputs. Raises UserError where they do not come out even."""
    if rows % 8 or columns % group_size:
        raise UserError(f"{tensors.folder}: {module} [{rows}, {columns}] does not divide into int4 groups")
    return columns // group_size


def unpack_int4(words: Tensor, order: Sequence[int] = _IN_ORDER) -> Tensor:
    """int32 [R, C/8] -> uint8 [R, C]; nibble i (from the low end) of a word holds its column order[i]."""
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
    """The numbers of the aligned runs of `width` that an index is made of; -1 where it is all -1."""
    rows = index.view(-1, width)
    runs = rows[:, 0] // width
    whole = torch.where(runs.unsqueeze(1) < 0, -1, runs.unsqueeze(1) * width + torch.arange(width))
    assert torch.equal(rows, whole), f"not made of aligned runs of {width}"
    return runs


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A four-bit matrix in one layout, whichever file it came from: packed along N, with K outside.

    A rank's share of the outputs is then columns of every tensor (by eights), of the inputs it is rows (by groups).
    """

    packed: Tensor  # [K, N/8] int32, nibble i of word c is column 8c + i
    scales: Tensor  # [K/g, N]
    zeros: Tensor  # [K/g, N/8] int32, packed like the codes
    group_size: int
    bias: Tensor | None = None  # [N]
    rounds: bool = False  # whether rows of activations are rounded to int8 before they meet it

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[N, K] in `dtype`: (q - z) * s, rounded once."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        codes = unpack_int4(self.packed).to(wide).unflatten(0, (-1, self.group_size))
        zeros = unpack_int4(self.zeros).to(wide).unsqueeze(1)
        weight = codes.sub_(zeros).mul_(self.scales.to(wide).unsqueeze(1))
        return weight.flatten(0, 1).T.contiguous().to(dtype)

    def product(self, device: torch.device | str) -> Callable[[Tensor], Tensor] | None:
        """See `Weight.product`."""
        if not self.rounds:
            return None
        codes = unpack_int4(self.packed).to(device, torch.float32).unflatten(0, (-1, self.group_size))
        zeros, scales = unpack_int4(self.zeros).to(device, torch.float32), self.scales.to(device, torch.float32)
        bias = None if self.bias is None else self.bias.to(device, torch.float32)
        return partial(rounded_product, codes=codes, scales=scales, zeros=zeros, bias=bias)

    def outputs(self, index: Tensor) -> Int4Weight:
        """As `Weight.outputs`; the index comes in aligned eights."""
        eights = _runs(index, 8)
        packed, zeros = select(self.packed, 1, eights), select(self.zeros, 1, eights)
        bias = None if self.bias is None else select(self.bias, 0, index)
        return replace(self, packed=packed, scales=select(self.scales, 1, index), zeros=zeros, bias=bias)

    def inputs(self, index: Tensor, run: int) -> Int4Weight:
        """As `Weight.inputs`. Where a run is not made of whole groups (heads narrower than a group) the groups become
        smaller."""
        weight = self.regroup(math.gcd(self.group_size, run))
        groups = _runs(index, weight.group_size)
        scales, zeros = select(weight.scales, 0, groups), select(weight.zeros, 0, groups)
        return replace(weight, packed=select(weight.packed, 0, index), scales=scales, zeros=zeros)

    def stack(self, others: Sequence[Int4Weight], bias: Tensor | None) -> Int4Weight:
        parts = (self, *others)
        packed, scales, zeros = (
            torch.cat(tensors, 1) for tensors in zip(*((part.packed, part.scales, part.zeros) for part in parts))
        )
        return replace(self, packed=packed, scales=scales, zeros=zeros, bias=bias)

    def regroup(self, group_size: int) -> Int4Weight:
        """The same matrix in smaller groups, several of which have the same scale and zero point."""
        times, rest = divmod(self.group_size, group_size)
        assert rest == 0
        if times == 1:
            return self
        scales, zeros = (x.repeat_interleave(times, 0) for x in (self.scales, self.zeros))
        return replace(self, scales=scales, zeros=zeros, group_size=group_size)
