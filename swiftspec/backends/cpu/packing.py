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
    rounds: bool  # its rows of activations are rounded to int8


@runtime_checkable
class Int8(Protocol):
    """What model.formats.int8.Int8Weight holds."""

    codes: Tensor  # [N, K] int8
    scales: Tensor  # [N, K / g]


@dataclass(frozen=True, slots=True)
class Packed:
    """A projection made ready at load; the tensors are what the native side reads."""

    native: _C.Weights
    outputs: int
    data: Tensor  # blocks of 16 outputs; csrc/host/ops/product.h has the layouts
    scales: Tensor | None  # int4, int8: [N / 16, K / g, 16]
    zeros: Tensor | None  # int4: [N / 16, K / g, 16] uint8
    bias: Tensor | None  # [N] float32


def pack(weight: Weight, dtype: torch.dtype, device: torch.device | str) -> Packed:
    """A checkpoint's matrix [N, K], dense, int4 or int8, in blocks of 16 outputs."""
    bias = None if weight.bias is None else weight.bias.to(device, torch.float32).contiguous()
    scales = zeros = None
    rounds = False
    if isinstance(weight, Int4) and weight.group_size % 16 == 0:
        inputs, outputs = weight.packed.shape[0], weight.scales.shape[1]
        rounds = weight.rounds
        data, scales, zeros = _pack_codes(weight), _by_blocks(weight.scales), _by_blocks(_unpack(weight.zeros))
    elif isinstance(weight, Int8):
        outputs, inputs = weight.codes.shape
        rounds = True
        data, scales = _pack_bytes(weight.codes), _by_blocks(weight.scales.T)
    else:
        dense = weight.dequantize(dtype)
        outputs, inputs = dense.shape
        data = _pack_dense(dense)
    native = _C.Weights(data, scales, zeros, bias, inputs, outputs, rounds)
    return Packed(native, outputs, data, scales, zeros, bias)


def _pack_dense(dense: Tensor) -> Tensor:
    """[N, K] -> [N / 16, K / 2, 16, 2] bfloat16 or [N / 16, K, 16] float32, N and K padded with zeros."""
    outputs, inputs = dense.shape
    blocks = F.pad(dense, (0, -inputs % 8, 0, -outputs % 16)).unflatten(0, (-1, 16))
    if dense.dtype == torch.bfloat16:
        return blocks.unflatten(2, (-1, 2)).transpose(1, 2).contiguous()
    return blocks.transpose(1, 2).contiguous()


def _unpack(words: Tensor) -> Tensor:
    """int32 [R, C/8] -> uint8 [R, C] of codes."""
    codes = (words.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32)).bitwise_and_(15)
    return codes.to(torch.uint8).flatten(1)


def _pack_codes(weight: Int4) -> Tensor:
    """[N / 16, K / 8, 16] int32: of the eight codes of a word input 2i is nibble i, input 2i + 1 nibble 4 + i."""
    codes = _unpack(weight.packed)
    codes = F.pad(codes, (0, -codes.shape[1] % 16)).int().unflatten(0, (-1, 4, 2))  # [K / 8, 4, 2, N]
    shifts = torch.tensor([[0, 16], [4, 20], [8, 24], [12, 28]], dtype=torch.int32)
    words = (codes << shifts.unsqueeze(-1)).sum((1, 2), dtype=torch.int32)  # the bits do not meet: a sum is an or
    return words.unflatten(1, (-1, 16)).transpose(0, 1).contiguous()


def _pack_bytes(codes: Tensor) -> Tensor:
    """[N, K] int8 -> [N / 16, K / 4, 16] int32 of bytes with 128 added; of eight inputs 0 4 1 5 are one word, 2 6 3 7
    the next."""
    stored = F.pad(codes, (0, 0, 0, -codes.shape[0] % 16)).view(torch.uint8) ^ 128
    eights = stored.unflatten(1, (-1, 8))[:, :, [0, 4, 1, 5, 2, 6, 3, 7]]  # [N, K / 8, 8]
    words = eights.flatten(1).view(torch.int32)  # [N, K / 4]
    return words.unflatten(0, (-1, 16)).transpose(1, 2).contiguous()


def _by_blocks(groups: Tensor) -> Tensor:
    """[K / g, N] -> [N / 16, K / g, 16], N padded with zeros."""
    padded = F.pad(groups, (0, -groups.shape[1] % 16))
    return padded.unflatten(1, (-1, 16)).transpose(0, 1).contiguous()
