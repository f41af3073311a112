"""The "pack-quantized" format of int4 weights of compressed-tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swiftspec.errors import UserError, truncated_repr
from swiftspec.file_io import Fields
from swiftspec.model.checkpoint import Source
from swiftspec.model.config_json import Json
from swiftspec.model.formats.int4 import Int4Weight, check, groups

EIGHTS = -0x77777778  # eight nibbles of 8, the zero point of symmetric codes


def from_pack_quantized(
    packed: Tensor, scale: Tensor, zero_point: Tensor | None, group_size: int, bias: Tensor | None = None
) -> Int4Weight:
    """Creates a weight from packed [outputs, inputs / 8], scale [outputs, groups], and zero_point [outputs / 8, groups]
    or None (symmetric codes), where groups = inputs / `group_size`.

    Codes and zero points are signed and stored with an offset of 8, which cancels in q - z.
    """
    if zero_point is None:
        zero_point = torch.full((scale.shape[0] // 8, scale.shape[1]), EIGHTS, dtype=torch.int32)
    return Int4Weight(packed, scale, zero_point, group_size, bias, order="inputs")


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """Reader of pack-quantized matrices."""

    group_size: int  # inputs that share a scale
    zero_point: bool  # whether the file has zero points

    @staticmethod
    def of(data: Json) -> CompressedTensors:
        """Parses config.json's `quantization_config`. Raises UserError if a feature is not supported."""
        fields = Fields(data, "quantization_config.")
        found = fields.object("config_groups")
        if len(found.data) != 1:
            raise UserError("compressed-tensors with zero or several config groups is not supported")
        group = found.object(*found.data)
        layout = group.string("format", fields.string("format", "none"))
        if layout != "pack-quantized":
            raise UserError(
                f"compressed-tensors format {truncated_repr(layout)} is not supported; only 'pack-quantized' is"
            )
        weights = group.object("weights")
        _refuse(fields, group, weights)
        group_size = check("compressed-tensors", weights.integer("num_bits"), weights.integer("group_size"))
        return CompressedTensors(group_size, not weights.boolean("symmetric", True))

    def linear(self, tensors: Source, module: str, rows: int, columns: int, bias: Tensor | None) -> Int4Weight:
        words, count = (torch.int32,), groups(tensors, module, rows, columns, self.group_size)
        packed = tensors.take(f"{module}.weight_packed", rows, columns // 8, kinds=words)
        scale = tensors.take(f"{module}.weight_scale", rows, count)
        zeros = None
        if self.zero_point:
            zeros = tensors.take(f"{module}.weight_zero_point", rows // 8, count, kinds=words)
        shape = tensors.take(f"{module}.weight_shape", 2, kinds=(torch.int32, torch.int64)).tolist()
        if shape != [rows, columns]:
            raise UserError(f"{module}.weight_shape is {shape}, expected [{rows}, {columns}]")
        return from_pack_quantized(packed, scale, zeros, self.group_size, bias)


def _refuse(fields: Fields, group: Fields, weights: Fields) -> None:
    """Raises UserError if the checkpoint uses a feature of this format that is not supported."""
    sparsity = fields.object("sparsity_config").string("format", "dense")
    kind, strategy = weights.string("type", "int"), weights.string("strategy", "group")
    order = weights.data.get("actorder")
    refused = {
        "quantised activations": group.data.get("input_activations") or group.data.get("output_activations"),
        "a quantised KV cache": fields.data.get("kv_cache_scheme"),
        "weight transforms": fields.data.get("transform_config"),
        f"sparsity {truncated_repr(sparsity)}": sparsity != "dense",
        f"activation order {truncated_repr(order)}": order is not None and order is not False,
        f"weight type {truncated_repr(kind)}": kind != "int",
        f"weight strategy {truncated_repr(strategy)}": strategy != "group",
        "dynamic weights": weights.boolean("dynamic"),
    }
    for what, used in refused.items():
        if used:
            raise UserError(f"compressed-tensors with {what} is not supported")
