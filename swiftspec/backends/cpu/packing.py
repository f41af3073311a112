"""Weights as the native operators read them: blocks of 16 outputs, laid out once at load (csrc/host/ops/product.h)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec import _C
from swiftspec.model.weights import Weight


@runtime_checkable
class Int4(Protocol):
    """What model.formats.int4.Int4Weight holds."""

    packed: Tensor  # [K, N/8] int32, nibble i of word c is column 8c + i
    scales: Tensor  # [K/g, N]
    zeros: Tensor  # [K/g, N/8] int32, packed like the codes
    group_size: int


@dataclass(frozen=True, slots=True)
class Packed:
    """A projection made ready at load; the tensors are what the native side reads."""

    native: _C.Weights
    outputs: int
    data: Tensor  # blocks of 16 outputs; csrc/host/ops/product.h has the layouts
    groups: Tensor | None  # int4: [N / 16, K / g, 2, 16] float32
    bias: Tensor | None  # [N] float32


def pack(weight: Weight, dtype: torch.dtype, device: torch.device | str) -> Packed:
    """A checkpoint's matrix [N, K], dense or int4, in blocks of 16 outputs."""
    bias = None if weight.bias is None else weight.bias.to(device, torch.float32).contiguous()
    groups = None
    if isinstance(weight, Int4) and weight.group_size % 16 == 0:
        inputs, outputs = weight.packed.shape[0], weight.scales.shape[1]
        data, groups = _pack_codes(weight), _pack_groups(weight)
    else:
        dense = weight.dequantize(dtype)
        outputs, inputs = dense.shape
        data = _pack_dense(dense)
    return Packed(_C.Weights(data, groups, bias, inputs, outputs), outputs, data, groups, bias)


def _pack_dense(dense: Tensor) -> Tensor:
    """[N, K] -> [N / 16, K / 2, 16, 2] bfloat16 or [N / 16, K, 16] float32, N and K padded with zeros."""
    outputs, inputs = dense.shape
    blocks = F.pad(dense, (0, -inputs % 8, 0, -outputs % 16)).unflatten(0, (-1, 16))
    if dense.dtype == torch.bfloat16:
        return blocks.unflatten(2, (-1, 2)).transpose(1, 2).contiguous()
    return blocks.transpose(1, 2).contiguous()


def _unpack(words: Tensor) -> Tensor:
    """int32 [R, C/8] -> int32 [R, C padded to 16] of codes; the padding is zero."""
    codes = (words.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32)).bitwise_and_(15).flatten(1)
    return F.pad(codes, (0, -codes.shape[1] % 16))


def _pack_codes(weight: Int4) -> Tensor:
    """[N / 16, K / 8, 16] int32: of the eight codes of a word input 2i is nibble i, input 2i + 1 nibble 4 + i."""
    codes = _unpack(weight.packed).unflatten(0, (-1, 4, 2))  # [K / 8, 4, 2, N]
    shifts = torch.tensor([[0, 16], [4, 20], [8, 24], [12, 28]], dtype=torch.int32)
    words = (codes << shifts.unsqueeze(-1)).sum((1, 2), dtype=torch.int32)  # the bits do not meet: a sum is an or
    return words.unflatten(1, (-1, 16)).transpose(0, 1).contiguous()


def _pack_groups(weight: Int4) -> Tensor:
    """[N / 16, K / g, 2, 16] float32: the scale, and 8 - z, which makes of (code - 8) x the (code - z) x."""
    scales = F.pad(weight.scales.float(), (0, -weight.scales.shape[1] % 16))
    pairs = torch.stack((scales, 8.0 - _unpack(weight.zeros)), 1)  # [K / g, 2, N]
    return pairs.unflatten(2, (-1, 16)).permute(2, 0, 1, 3).contiguous()
