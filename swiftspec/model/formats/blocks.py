"""GGML's quantised blocks, in which the matrices of a GGUF file are stored: w = q * s + m, where each output has one
scale s per group of inputs, and in some types one minimum m. ggml-common.h and ggml-quants.c of llama.cpp define
them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from swiftspec.errors import UserError
from swiftspec.file_io import Fields
from swiftspec.model.checkpoint import Source
from swiftspec.model.config_json import Json
from swiftspec.model.formats.int8 import Int8Weight
from swiftspec.model.formats.mxfp4 import DOUBLED, EXPONENT_BIAS, GROUP, GROUP_BYTES, Mxfp4Weight
from swiftspec.model.weights import select

GGUF_METHOD = "gguf"  # `quant_method` of a GGUF file's configuration
SUPER_BLOCK = 256  # inputs of a block of the K types
NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # values of the codes of IQ4_NL
STRIP_ROWS = 4096  # rows that are dequantised at a time, because intermediates are float32
Unpacked = tuple[Tensor, Tensor, Tensor | None]  # codes int8, scales float32, minima float32: [rows, blocks, ...]


def _half(blocks: Tensor, at: int) -> Tensor:
    """Returns the float16 at byte `at` of each block as float32: [..., bytes] -> [..., 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(codes: Tensor, run: int) -> Tensor:
    """Unpacks bytes [..., bytes] to codes [..., 2 * bytes]: of each `run` bytes the low nibbles, then the high ones."""
    parts = codes.unflatten(-1, (-1, run))
    out = torch.empty(*parts.shape[:-1], 2, run, dtype=torch.uint8)
    torch.bitwise_and(parts, 15, out=out[..., 0, :])
    torch.bitwise_right_shift(parts, 4, out=out[..., 1, :])
    return out.flatten(-3)


def _q4_0(blocks: Tensor) -> Unpacked:
    return _nibbles(blocks[..., 2:], 16).to(torch.int8) - 8, _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> Unpacked:
    return _nibbles(blocks[..., 4:], 16).to(torch.int8), _half(blocks, 0), _half(blocks, 2)


def _fifth_bits(bits: Tensor) -> Tensor:
    """Returns the fifth bits of 32 codes as 0 or 16: bit i of the bytes [..., 4] for code i."""
    return (bits.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2) << 4


def _q5_0(blocks: Tensor) -> Unpacked:
    codes = _nibbles(blocks[..., 6:], 16) | _fifth_bits(blocks[..., 2:6])
    return codes.to(torch.int8) - 16, _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> Unpacked:
    codes = _nibbles(blocks[..., 8:], 16) | _fifth_bits(blocks[..., 4:8])
    return codes.to(torch.int8), _half(blocks, 0), _half(blocks, 2)


def _iq4_nl(blocks: Tensor) -> Unpacked:
    return torch.tensor(NON_LINEAR, dtype=torch.int8)[_nibbles(blocks[..., 2:], 16).int()], _half(blocks, 0), None


def _q8_0(blocks: Tensor) -> Unpacked:
    return blocks[..., 2:].contiguous().view(torch.int8), _half(blocks, 0), None


def _super_groups(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scales and minima [..., 8] of the groups of Q4_K and Q5_K: two halves, and six bits of each in twelve
    bytes."""
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), -1)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6) << 4), -1)
    return scales.float() * _half(blocks, 0), -(minima.float() * _half(blocks, 2))


def _q4_k(blocks: Tensor) -> Unpacked:
    return _nibbles(blocks[..., 16:], 32).to(torch.int8), *_super_groups(blocks)


def _q5_k(blocks: Tensor) -> Unpacked:
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(1)
    fifth = (blocks[..., 16:48].unsqueeze(-2) >> shifts & 1).flatten(-2)
    return (_nibbles(blocks[..., 48:], 32) | fifth << 4).to(torch.int8), *_super_groups(blocks)


def _q6_k(blocks: Tensor) -> Unpacked:
    low, high = blocks[..., :128].unflatten(-1, (2, 64)), blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    four = torch.cat((low & 15, low >> 4), -1)
    two = (high >> torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(1) & 3).flatten(-2)
    codes = (four | two << 4).flatten(-2).to(torch.int8) - 32
    return codes, blocks[..., 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208), None


def _mxfp4(blocks: Tensor) -> Unpacked:
    codes = torch.tensor(DOUBLED, dtype=torch.int8)[_nibbles(blocks[..., 1:], GROUP_BYTES).int()]
    exponents = blocks[..., :1].int() - (EXPONENT_BIAS + 1)
    return codes, torch.ldexp(torch.ones(exponents.shape), exponents), None


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of quantised blocks."""

    name: str  # GGML's
    inputs: int  # inputs per block
    bytes: int  # bytes per block
    group_size: int  # inputs per scale
    bits: int  # of a code when it is packed for an operator: 4 (0..15) or 8
    scale_dtype: torch.dtype  # of packed scales and minima; if it has one byte, each block has a float16 factor of them
    minima: bool
    unpack_blocks: Callable[[Tensor], Unpacked]
    packs: bool = True  # whether operators pack the blocks themselves, instead of the codes of `BlockWeight.unpacked`

    def row_bytes(self, inputs: int) -> int:
        """Returns the size of an output with `inputs` inputs, a multiple of `self.inputs`."""
        return inputs // self.inputs * self.bytes

    def unpack(self, rows: Tensor) -> Unpacked:
        """Unpacks rows [outputs, bytes] uint8 to codes [outputs, inputs] int8, scales and minima [outputs, groups]
        float32."""
        codes, scales, minima = self.unpack_blocks(rows.unflatten(1, (-1, self.bytes)))
        return codes.flatten(1), scales.flatten(1), None if minima is None else minima.flatten(1)


BLOCK_TYPES = {
    kind.name: kind
    for kind in (
        BlockType("Q4_0", 32, 18, 32, 4, torch.float16, minima=False, unpack_blocks=_q4_0),
        BlockType("Q4_1", 32, 20, 32, 4, torch.float16, minima=True, unpack_blocks=_q4_1),
        BlockType("Q5_0", 32, 22, 32, 8, torch.float16, minima=False, unpack_blocks=_q5_0, packs=False),
        BlockType("Q5_1", 32, 24, 32, 8, torch.float16, minima=True, unpack_blocks=_q5_1, packs=False),
        BlockType("IQ4_NL", 32, 18, 32, 8, torch.float16, minima=False, unpack_blocks=_iq4_nl, packs=False),
        BlockType("Q8_0", 32, 34, 32, 8, torch.float16, minima=False, unpack_blocks=_q8_0),
        BlockType("Q4_K", SUPER_BLOCK, 144, 32, 4, torch.uint8, minima=True, unpack_blocks=_q4_k),
        BlockType("Q5_K", SUPER_BLOCK, 176, 32, 8, torch.uint8, minima=True, unpack_blocks=_q5_k),
        BlockType("Q6_K", SUPER_BLOCK, 210, 16, 8, torch.int8, minima=False, unpack_blocks=_q6_k),
    )
}


FLOAT4 = BlockType(
    "MXFP4", GROUP, 1 + GROUP_BYTES, GROUP, 4, torch.uint8, minima=False, unpack_blocks=_mxfp4
)  # see `float4_weight`
FILE_TYPES = {**BLOCK_TYPES, FLOAT4.name: FLOAT4}  # all types that are read


def float4_weight(rows: Tensor, bias: Tensor | None = None) -> Mxfp4Weight:
    """Returns the matrix in MXFP4 blocks [outputs, bytes] uint8 with its codes in the order of safetensors files. A
    block is an exponent, and 16 bytes of which byte i has the codes of the inputs i and i + 16."""
    blocks = rows.unflatten(1, (-1, FLOAT4.bytes))
    codes = torch.empty(*blocks.shape[:2], GROUP_BYTES, dtype=torch.uint8)
    for part, out in zip(blocks.split(STRIP_ROWS), codes.split(STRIP_ROWS), strict=True):
        both = _nibbles(part[..., 1:], GROUP_BYTES)
        torch.bitwise_or(both[..., ::2], both[..., 1::2] << 4, out=out)
    return Mxfp4Weight(codes, blocks[..., 0].contiguous(), bias)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """Matrix in quantised blocks as they are in the file; converted only when a backend packs it."""

    rows: Tensor  # [outputs, bytes] uint8
    kind: BlockType
    bias: Tensor | None = None  # [outputs], including the outputs in `rest`
    int8_activations: int = 0  # int8 numbers to which the product quantises an activation: 0, 1 or 2
    rest: tuple[BlockWeight, ...] = ()  # matrices with further outputs, of the same type

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs), including the outputs in `rest`."""
        outputs, size = self.rows.shape
        return outputs + sum(part.shape[0] for part in self.rest), size // self.kind.bytes * self.kind.inputs

    @property
    def parts(self) -> tuple[BlockWeight, ...]:
        """The matrix divided along the outputs: this one and those in `rest`, each without bias and with an empty
        `rest`."""
        return (replace(self, rest=(), bias=None), *self.rest)

    def unpacked(self) -> Int8Weight:
        """Returns the same matrix with int8 codes, and scales in float32 or in the block's float16."""
        codes: tuple[Tensor, ...]
        scales: tuple[Tensor, ...]
        minima: tuple[Any, ...]
        codes, scales, minima = zip(*(self.kind.unpack(part.rows) for part in self.parts))
        kind = self.kind.scale_dtype if self.kind.scale_dtype.is_floating_point else torch.float32
        lowest = _joined(minima).to(kind) if self.kind.minima else None
        return Int8Weight(_joined(codes), _joined(scales).to(kind), self.bias, lowest, self.int8_activations)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns the dense matrix [outputs, inputs] in `dtype`: GGML's float32 values, rounded once."""
        dense, first = torch.empty(self.shape, dtype=dtype), 0
        for part in self.parts:
            for rows in part.rows.split(STRIP_ROWS):
                dense[first : first + len(rows)] = replace(part, rows=rows).unpacked().dequantize(torch.float32)
                first += len(rows)
        return dense

    def product(self, device: torch.device | str) -> Callable[[Tensor], Tensor] | None:
        """See `Weight.product`."""
        return self.unpacked().product(device)

    def outputs(self, index: Tensor) -> BlockWeight:
        """See `Weight.outputs`. A row of zero bytes is a row of zeros."""
        rows = torch.cat([part.rows for part in self.parts]) if self.rest else self.rows
        bias = None if self.bias is None else select(self.bias, 0, index)
        return replace(self, rows=select(rows, 0, index), bias=bias, rest=())

    def inputs(self, index: Tensor, run: int) -> BlockWeight | Int8Weight:
        """See `Weight.inputs`. Blocks that a run divides are unpacked."""
        if run % self.kind.inputs:
            return self.unpacked().inputs(index, run)
        blocks = torch.div(index[:: self.kind.inputs], self.kind.inputs, rounding_mode="floor")
        parts = [
            replace(part, rows=select(part.rows.unflatten(1, (-1, self.kind.bytes)), 1, blocks).flatten(1))
            for part in self.parts
        ]
        return replace(parts[0], rest=tuple(parts[1:]), bias=self.bias)

    def stack(self, others: Sequence[BlockWeight], bias: Tensor | None) -> BlockWeight | Int8Weight:
        """See `Weight.stack`. Matrices of several types become one with int8 codes, whose values are the same."""
        first, *rest = (part for weight in (self, *others) for part in weight.parts)
        if all(part.kind == first.kind for part in rest):
            return replace(first, rest=tuple(rest), bias=bias)
        unpacked = [part.unpacked() for part in (first, *rest)]
        group = math.gcd(*(weight.group_size for weight in unpacked))
        first, *rest = (weight.regroup(group).with_minima() for weight in unpacked)
        return first.stack(rest, bias)


@runtime_checkable
class BlockTensors(Protocol):
    """Tensors of a file whose matrices are in blocks; see gguf/tensors.py."""

    def take_blocks(self, name: str, rows: int, columns: int, /) -> tuple[Tensor, BlockType]:
        """Returns the matrix `name` [rows, columns] as rows of blocks [rows, bytes] uint8, and their type. Raises
        UserError if it is missing or has another shape."""
        ...


@dataclass(frozen=True, slots=True)
class Blocks:
    """Reader of the quantised matrices of a GGUF file."""

    group_size: int  # inputs of the largest block

    @property
    def is_int4(self) -> bool:
        return False

    @staticmethod
    def of(data: Json) -> Blocks:
        """Parses the configuration that gguf/config.py writes."""
        return Blocks(Fields(data, "quantization_config.").integer("block_inputs", SUPER_BLOCK, ge=32, le=SUPER_BLOCK))

    def linear(
        self, tensors: Source, module: str, rows: int, columns: int, bias: Tensor | None
    ) -> BlockWeight | Mxfp4Weight:
        """Reads the matrix of `module`. One of type MXFP4 has the class of the format with that name."""
        if not isinstance(tensors, BlockTensors):
            raise UserError(f"{tensors.folder}: quantisation method '{GGUF_METHOD}' occurs in GGUF files only")
        blocks, kind = tensors.take_blocks(f"{module}.weight", rows, columns)
        return float4_weight(blocks, bias) if kind == FLOAT4 else BlockWeight(blocks, kind, bias)
