"""Float8 weights: w = q * s, where q is a float8 e4m3 number, and s the scale of the matrix, of its output, or of a
block of outputs and inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swiftspec.errors import UserError, truncated_repr
from swiftspec.file_io import Fields
from swiftspec.model.checkpoint import SCALES, Source
from swiftspec.model.config_json import Json
from swiftspec.model.weights import select

E4M3 = torch.float8_e4m3fn
STRIP_ROWS = 4096  # rows that are dequantised at a time, because intermediates are float32
MAX_BLOCK = 1 << 16  # outputs or inputs of a block
ACTIVATION_SCALES = ("input_", "activation_")  # how exporters begin the names of their scales
SHARD_UNIT = 128  # inputs


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """Matrix with float8 codes. All operators use it as a dense matrix."""

    codes: Tensor  # [outputs, inputs] float8 e4m3
    scales: Tensor  # [outputs, groups]; the last group may have fewer inputs
    group_size: int  # inputs per scale
    bias: Tensor | None = None  # [outputs]

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.codes.shape
        return outputs, inputs

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns the dense matrix [outputs, inputs] in `dtype`: q * s in float32, rounded once."""
        dense, columns = torch.empty(self.codes.shape, dtype=dtype), self.codes.shape[1]
        for start in range(0, len(dense), STRIP_ROWS):
            rows = slice(start, start + STRIP_ROWS)
            scales = self.scales[rows].float()
            if scales.shape[1] > 1:
                scales = scales.repeat_interleave(self.group_size, 1)[:, :columns]
            dense[rows] = self.codes[rows].float() * scales
        return dense

    def product(self, device: torch.device | str) -> None:
        return None

    def outputs(self, index: Tensor) -> Float8Weight:
        """See `Weight.outputs`."""
        bias = None if self.bias is None else select(self.bias, 0, index)
        codes = select(self.codes.view(torch.uint8), 0, index).view(E4M3)
        return replace(self, codes=codes, scales=select(self.scales, 0, index), bias=bias)

    def inputs(self, index: Tensor, run: int) -> Float8Weight:
        """See `Weight.inputs`. If a run is not a multiple of the group size, the groups are split."""
        group = math.gcd(self.group_size, run)
        scales = self.scales.repeat_interleave(self.group_size // group, 1)
        groups = torch.div(index[::group], group, rounding_mode="floor")
        codes = select(self.codes.view(torch.uint8), 1, index).view(E4M3)
        return replace(self, codes=codes, scales=select(scales, 1, groups), group_size=group)

    def stack(self, others: Sequence[Float8Weight], bias: Tensor | None) -> Float8Weight:
        parts = (self, *others)
        codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(E4M3)
        return replace(self, codes=codes, scales=torch.cat([part.scales for part in parts]), bias=bias)


def take_scaled(
    tensors: Source, module: str, rows: int, columns: int, block: tuple[int, int] | None, kind: torch.dtype
) -> tuple[Tensor, Tensor, int]:
    """Reads the tensor "weight" [rows, columns] of dtype `kind` and its scale. Returns codes [rows, columns], scales
    [rows, groups] float32, and the number of inputs per scale.

    `block`: (outputs, inputs) that share a scale; None: the shape of the scale determines whether it is that of the
    matrix, one per output, or one per output and group of inputs. Scales of activations are ignored: activations are
    not rounded to the checkpoint's format. Raises UserError if a tensor is missing or its shape or dtype does not fit.
    """
    codes = tensors.take(f"{module}.weight", rows, columns, kinds=(kind,))
    name = next((f"{module}.{scale}" for scale in SCALES if f"{module}.{scale}" in tensors), f"{module}.{SCALES[0]}")
    found = tensors.shape_of(name)
    for beginning in ACTIVATION_SCALES:
        tensors.skip(f"{module}.{beginning}")
    if block is not None:
        by_rows, by_columns = block
        scales = tensors.take(name, -(-rows // by_rows), -(-columns // by_columns)).float()
        return codes, scales.repeat_interleave(by_rows, 0)[:rows], by_columns
    if math.prod(found) == 1:
        return codes, tensors.take(name, *found).float().reshape(1, 1).expand(rows, 1), columns
    groups = found[1] if len(found) == 2 and found[1] > 0 and columns % found[1] == 0 else 1
    scales = tensors.take(name, *((rows,) if len(found) == 1 else (rows, groups))).float()
    return codes, scales.view(rows, groups), columns // groups


def parse_block(fields: Fields, name: str) -> tuple[int, int] | None:
    """Returns the numbers of outputs and inputs in a block; None if the field is missing. Raises UserError if it is
    invalid."""
    sizes = fields.integers(name, ge=1, le=MAX_BLOCK)
    if len(sizes) not in (0, 2):
        raise fields.error(name, "be a list of two numbers")
    return (sizes[0], sizes[1]) if sizes else None


@dataclass(frozen=True, slots=True)
class Float8:
    """Reader of float8 matrices: per tensor, per output, or in blocks, as in DeepSeek's and Qwen's releases."""

    block: tuple[int, int] | None  # outputs and inputs that share a scale

    @property
    def group_size(self) -> int:
        return SHARD_UNIT if self.block is None else self.block[1]

    @property
    def is_int4(self) -> bool:
        return False

    @staticmethod
    def of(data: Json) -> Float8:
        """Parses config.json's `quantization_config` of method "fp8" or "fbgemm_fp8". Raises UserError if a feature is
        not supported."""
        fields = Fields(data, "quantization_config.")
        kind = fields.string("fmt", "e4m3")
        if kind != "e4m3":
            raise UserError(f"fp8 of format {truncated_repr(kind)} is not supported; only 'e4m3' is")
        if fields.data.get("kv_cache_scheme"):
            raise UserError("fp8 with a quantised KV cache is not supported")
        return Float8(parse_block(fields, "weight_block_size"))

    def linear(self, tensors: Source, module: str, rows: int, columns: int, bias: Tensor | None) -> Float8Weight:
        return Float8Weight(*take_scaled(tensors, module, rows, columns, self.block, E4M3), bias)
