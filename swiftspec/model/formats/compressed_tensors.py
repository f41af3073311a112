"""Formats of compressed-tensors: "pack-quantized" for int4 and int8 weights, "int-quantized" for int8 and
"float-quantized" for float8 weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeGuard

import torch
from torch import Tensor

from swiftspec.errors import UserError, truncated_repr
from swiftspec.file_io import Fields
from swiftspec.model.checkpoint import Source
from swiftspec.model.config_json import Json
from swiftspec.model.formats.float8_codes import E4M3, SHARD_UNIT, Float8Weight, parse_block, take_scaled
from swiftspec.model.formats.gptq import input_order
from swiftspec.model.formats.int4 import Int4Weight, check, groups, pack_int4, unpack_int4
from swiftspec.model.formats.int8 import Int8Weight
from swiftspec.model.weights import Weight

Layout = Literal["pack-quantized", "int-quantized", "float-quantized"]
STRATEGIES: dict[str, tuple[str, ...]] = {  # of 8-bit weights, by format
    "pack-quantized": ("channel", "group"),
    "int-quantized": ("tensor", "channel", "group"),
    "float-quantized": ("tensor", "channel", "block"),
}
ORDERS = (None, False, "weight", "static", "group", "dynamic")  # values of `actorder`; the last two add weight_g_idx
MAX_GROUP = 128  # inputs per scale of an int8 weight; larger groups are split
EIGHTS = -0x77777778  # eight nibbles of 8, the zero point of symmetric codes


def from_pack_quantized(
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    group_size: int,
    bias: Tensor | None = None,
    *,
    order: Tensor | None = None,
) -> Int4Weight:
    """Creates a weight from packed [outputs, inputs / 8], scale [outputs, groups], and zero_point [outputs / 8, groups]
    or None (symmetric codes), where groups = inputs / `group_size`. `order`: [inputs] int64, the inputs sorted by group
    ("activation order"); None: they are sorted already.

    Codes and zero points are signed and stored with an offset of 8, which cancels in q - z.
    """
    if zero_point is None:
        zero_point = torch.full((scale.shape[0] // 8, scale.shape[1]), EIGHTS, dtype=torch.int32)
    if order is not None:
        packed = pack_int4(unpack_int4(packed).index_select(1, order))
    return Int4Weight(packed, scale, zero_point, group_size, bias, order="inputs", permutation=order)


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """Reader of int4, int8 and float8 matrices."""

    layout: Layout
    bits: int  # of a code; 4 only in "pack-quantized"
    inputs_per_scale: int | None  # None: the shape of the scale determines it
    zero_point: bool  # whether the file has zero points
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale

    @property
    def group_size(self) -> int:
        return (SHARD_UNIT if self.block is None else self.block[1]) if self.bits == 8 else self.inputs_per_scale or 0

    @property
    def is_int4(self) -> bool:
        return self.bits == 4

    @staticmethod
    def of(data: Json) -> CompressedTensors:
        """Parses config.json's `quantization_config`. Raises UserError if a feature is not supported."""
        fields = Fields(data, "quantization_config.")
        found = fields.object("config_groups")
        if len(found.data) != 1:
            raise UserError("compressed-tensors with zero or several config groups is not supported")
        group = found.object(*found.data)
        layout = group.string("format", fields.string("format", "none"))
        weights = group.object("weights")
        bits = weights.integer("num_bits")
        if layout == "naive-quantized":
            layout = "float-quantized" if weights.string("type", "int") == "float" else "int-quantized"
        if not _is_layout(layout):
            *most, last = map(repr, STRATEGIES)
            raise UserError(
                f"compressed-tensors format {truncated_repr(layout)} is not supported; {', '.join(most)} and {last} are"
            )
        _refuse(fields, group, weights, layout)
        symmetric = weights.boolean("symmetric", True)
        if layout == "pack-quantized" and bits == 4:
            group_size = check("compressed-tensors", bits, weights.integer("group_size"))
            return CompressedTensors(layout, 4, group_size, not symmetric)
        if bits != 8:
            raise UserError(f"compressed-tensors '{layout}' with {bits} bits is not supported")
        if not symmetric:
            raise UserError("compressed-tensors with zero points of int8 weights is not supported")
        return CompressedTensors(layout, 8, None, False, parse_block(weights, "block_structure"))

    def linear(self, tensors: Source, module: str, rows: int, columns: int, bias: Tensor | None) -> Weight:
        if self.bits == 4:
            return self._int4(tensors, module, rows, columns, bias)
        if self.layout == "float-quantized":
            return Float8Weight(*take_scaled(tensors, module, rows, columns, self.block, E4M3), bias)
        if self.layout == "int-quantized":
            codes, scales, group = take_scaled(tensors, module, rows, columns, self.block, torch.int8)
        else:
            codes, scales, group = self._packed_int8(tensors, module, rows, columns)
        return Int8Weight(codes, scales, bias, int8_activations=0).regroup(math.gcd(group, MAX_GROUP))

    def _int4(self, tensors: Source, module: str, rows: int, columns: int, bias: Tensor | None) -> Int4Weight:
        words, count = (torch.int32,), groups(tensors, module, rows, columns, self.group_size)
        packed = tensors.take(f"{module}.weight_packed", rows, columns // 8, kinds=words)
        scale = tensors.take(f"{module}.weight_scale", rows, count)
        zeros = None
        if self.zero_point:
            zeros = tensors.take(f"{module}.weight_zero_point", rows // 8, count, kinds=words)
        _check_shape(tensors, module, rows, columns)
        order = input_order(tensors, f"{module}.weight_g_idx", columns, count)
        return from_pack_quantized(packed, scale, zeros, self.group_size, bias, order=order)

    @staticmethod
    def _packed_int8(tensors: Source, module: str, rows: int, columns: int) -> tuple[Tensor, Tensor, int]:
        """Reads four codes per int32, each plus 128. Returns codes, scales, and the number of inputs per scale."""
        if columns % 4:
            raise UserError(f"{tensors.folder}: {module} [{rows}, {columns}] cannot be packed in int32")
        packed = tensors.take(f"{module}.weight_packed", rows, columns // 4, kinds=(torch.int32,))
        codes = (packed.view(torch.uint8) ^ 128).view(torch.int8)
        found = tensors.shape_of(f"{module}.weight_scale")
        count = found[1] if len(found) == 2 and found[1] > 0 and columns % found[1] == 0 else 1
        scales = tensors.take(f"{module}.weight_scale", rows, count).float()
        _check_shape(tensors, module, rows, columns)
        return codes, scales, columns // count


def _is_layout(name: str) -> TypeGuard[Layout]:
    return name in STRATEGIES


def _check_shape(tensors: Source, module: str, rows: int, columns: int) -> None:
    shape = tensors.take(f"{module}.weight_shape", 2, kinds=(torch.int32, torch.int64)).tolist()
    if shape != [rows, columns]:
        raise UserError(f"{module}.weight_shape is {shape}, expected [{rows}, {columns}]")


def _refuse(fields: Fields, group: Fields, weights: Fields, layout: str) -> None:
    """Raises UserError if the checkpoint uses a feature of this format that is not supported. Quantised activations are
    accepted with 8-bit weights; their scales are ignored."""
    sparsity = fields.object("sparsity_config").string("format", "dense")
    wanted = "float" if layout == "float-quantized" else "int"
    kind, strategy = weights.string("type", "int"), weights.string("strategy", "group")
    order = weights.data.get("actorder")
    activations = group.data.get("input_activations") if weights.integer("num_bits") == 4 else None
    strategies = ("group",) if weights.integer("num_bits") == 4 else STRATEGIES[layout]
    refused = {
        "quantised activations": activations or group.data.get("output_activations"),
        "a quantised KV cache": fields.data.get("kv_cache_scheme"),
        "weight transforms": fields.data.get("transform_config"),
        f"sparsity {truncated_repr(sparsity)}": sparsity != "dense",
        f"activation order {truncated_repr(order)}": order not in ORDERS,
        f"weight type {truncated_repr(kind)}": kind != wanted,
        f"weight strategy {truncated_repr(strategy)}": strategy not in strategies,
        "dynamic weights": weights.boolean("dynamic"),
    }
    for what, used in refused.items():
        if used:
            raise UserError(f"compressed-tensors with {what} is not supported")
