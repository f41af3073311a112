"""Weights as the native operators read them: blocks of 16 outputs, laid out once at load (csrc/host/ops/product.h)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec import _C
from swiftspec.model.weights import DenseWeight, Weight

BLOCK = 16  # outputs
STRIP = 4096  # rows of a dense matrix that are converted at a time, where they are not as the operators read them


@runtime_checkable
class Int4(Protocol):
    """What model.formats.int4.Int4Weight holds: there stands how."""

    packed: Tensor
    scales: Tensor
    zeros: Tensor
    group_size: int
    rounds: bool  # its rows of activations are rounded to int8
    order: str

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def parts(self) -> Sequence[Self]: ...
    def to(self, device: torch.device | str, /) -> Self: ...
    def in_order(self) -> Self: ...


@runtime_checkable
class Int8(Protocol):
    """What model.formats.int8.Int8Weight holds."""

    codes: Tensor  # [N, K] int8
    scales: Tensor  # [N, K / g]


@runtime_checkable
class Unrounded(Protocol):
    """What model.formats.int8.Unrounded holds."""

    dense: Tensor  # [N, K]
    group_size: int  # of the Int8 that it becomes


@dataclass(frozen=True, slots=True)
class Packed:
    """A projection made ready at load; the tensors are what the native side reads."""

    native: _C.Weights
    inputs: int
    outputs: int
    rounds: bool  # its rows of activations are rounded to int8
    data: Tensor  # blocks of 16 outputs; csrc/host/ops/product.h has the layouts
    scales: Tensor | None  # int4, int8: [N / 16, K / g, 16]
    zeros: Tensor | None  # int4: [N / 16, K / g, 16] uint8
    bias: Tensor | None  # [N] float32

    @staticmethod
    def of(
        inputs: int, outputs: int, rounds: bool, data: Tensor, scales: Tensor | None, zeros: Tensor | None,
        bias: Tensor | None,
    ) -> Packed:  # fmt: skip
        """Raises ValueError where these do not belong together."""
        native = _C.Weights(data, scales, zeros, bias, inputs, outputs, rounds)
        return Packed(native, inputs, outputs, rounds, data, scales, zeros, bias)

    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Codes or numbers, scales, zeros."""
        return self.data, self.scales, self.zeros


def pack(weight: Weight | Packed, dtype: torch.dtype, device: torch.device | str) -> Packed:
    """A checkpoint's matrix [N, K], dense, int4 or int8, in blocks of 16 outputs. What is packed stays as it is."""
    if isinstance(weight, Packed):
        return weight
    bias = None if weight.bias is None else weight.bias.to(device, torch.float32, copy=True)
    if isinstance(weight, Int4) and weight.group_size % 16 == 0:
        outputs, inputs = weight.shape
        return Packed.of(inputs, outputs, weight.rounds, *_pack_codes(weight), bias)
    if isinstance(weight, Unrounded):
        outputs, inputs = weight.dense.shape
        return Packed.of(inputs, outputs, True, *_round(weight.dense, weight.group_size), None, bias)
    if isinstance(weight, Int8):
        outputs, inputs = weight.codes.shape
        data, scales = _pack_bytes(weight.codes), _by_blocks(weight.scales.T)
        return Packed.of(inputs, outputs, True, data, scales, None, bias)
    dense = weight.weight if isinstance(weight, DenseWeight) else weight.dequantize(dtype)
    outputs, inputs = dense.shape
    return Packed.of(inputs, outputs, False, _pack_dense(dense, dtype), None, None, bias)


def _blocks(outputs: int) -> int:
    return -(-outputs // BLOCK)


def _pack_codes(weight: Int4) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N / 16, K / 8, 16] int32, scales and zeros. Of the eight codes of a word input 2i is nibble i, input
    2i + 1 nibble 4 + i."""
    outputs, inputs = weight.shape
    blocks, groups = _blocks(outputs), inputs // weight.group_size
    data = torch.empty(blocks, inputs // 8, BLOCK, dtype=torch.int32)
    kind = weight.scales.dtype if weight.scales.itemsize <= 4 else torch.float32
    scales = torch.empty(blocks, groups, BLOCK, dtype=kind)
    zeros = torch.empty(blocks, groups, BLOCK, dtype=torch.uint8)
    if outputs % BLOCK:
        for tensor in (data, scales, zeros):
            tensor[-1].zero_()
    first = 0
    for part in weight.parts:
        _C.pack_int4(part.packed, part.scales.to(kind), part.zeros, part.order, first, data, scales, zeros)
        first += part.shape[0]
    return data, scales, zeros


def _strips(dense: Tensor, kinds: Sequence[torch.dtype]) -> Iterator[tuple[slice, Tensor]]:
    """A matrix in one of these dtypes, its inputs filled up to a multiple of 8: whole where it is so already, else
    converted to the first of them, a part at a time. The slices are of blocks."""
    whole = dense.dtype in kinds and dense.shape[1] % 8 == 0 and dense.stride(1) == 1 and dense.stride(0) % 2 == 0
    step = len(dense) if whole else STRIP
    for start in range(0, len(dense), step):
        part = dense[start : start + step]
        blocks = slice(start // BLOCK, start // BLOCK + _blocks(len(part)))
        yield blocks, part if whole else F.pad(part.to(kinds[0]), (0, -dense.shape[1] % 8)).contiguous()


def _pack_dense(dense: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, K] -> [N / 16, K / 2, 16, 2] bfloat16 or [N / 16, K, 16] float32, N and K padded with zeros."""
    outputs, inputs = dense.shape[0], -(-dense.shape[1] // 8) * 8
    shape = (inputs // 2, BLOCK, 2) if dtype == torch.bfloat16 else (inputs, BLOCK)
    data = torch.empty(_blocks(outputs), *shape, dtype=dtype)
    for blocks, part in _strips(dense, [dtype]):
        _C.pack_dense(part, data[blocks])
    return data


def _round(dense: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """What `_pack_bytes` makes of Int8Weight.of(dense), and its scales, without anything between."""
    blocks, inputs = _blocks(dense.shape[0]), dense.shape[1]
    data = torch.empty(blocks, inputs // 4, BLOCK, dtype=torch.int32)
    scales = torch.empty(blocks, inputs // group, BLOCK, dtype=torch.bfloat16)
    for here, part in _strips(dense, [torch.float32, torch.bfloat16]):
        _C.pack_rounded(part, data[here], scales[here])
    return data, scales


def _pack_bytes(codes: Tensor) -> Tensor:
    """[N, K] int8 -> [N / 16, K / 4, 16] int32 of bytes with 128 added; of eight inputs 0 4 1 5 are one word, 2 6 3 7
    the next."""
    stored = F.pad(codes, (0, 0, 0, -codes.shape[0] % BLOCK)).view(torch.uint8) ^ 128
    eights = stored.unflatten(1, (-1, 8))[:, :, [0, 4, 1, 5, 2, 6, 3, 7]]  # [N, K / 8, 8]
    words = eights.flatten(1).view(torch.int32)  # [N, K / 4]
    return words.unflatten(0, (-1, BLOCK)).transpose(1, 2).contiguous()


def _by_blocks(groups: Tensor) -> Tensor:
    """[K / g, N] -> [N / 16, K / g, 16], N padded with zeros."""
    padded = F.pad(groups, (0, -groups.shape[1] % BLOCK))
    return padded.unflatten(1, (-1, BLOCK)).transpose(0, 1).contiguous()
