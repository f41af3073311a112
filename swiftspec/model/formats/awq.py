"""AutoAWQ's "gemm" format of int4 weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swiftspec.errors import UserError, truncated_repr
from swiftspec.file_io import Fields
from swiftspec.model.checkpoint import Source
from swiftspec.model.config_json import Json
from swiftspec.model.formats.int4 import Int4Weight, check, groups


def from_awq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, group_size: int, bias: Tensor | None = None
) -> Int4Weight:
    """Creates a weight from qweight [inputs, outputs / 8], qzeros [groups, outputs / 8] and scales [groups, outputs],
    where groups = inputs / `group_size`."""
    return Int4Weight(qweight, scales, qzeros, group_size, bias, order="awq")


@dataclass(frozen=True, slots=True)
class Awq:
    """Reader of AWQ matrices."""

    group_size: int  # inputs that share a scale

    @property
    def is_int4(self) -> bool:
        return True

    @staticmethod
    def of(data: Json) -> Awq:
        """Parses config.json's `quantization_config`. Raises UserError if a feature is not supported."""
        fields = Fields(data, "quantization_config.")
        version = (fields.string("version", "") or fields.string("format", "") or "gemm").lower()
        if version != "gemm":
            raise UserError(f"AWQ version {truncated_repr(version)} is not supported; only 'gemm' is")
        bits, group_size = fields.integer("bits", fields.integer("w_bit", 4)), fields.integer("q_group_size", 128)
        group_size = check("AWQ", bits, fields.integer("group_size", group_size))
        if not fields.boolean("zero_point", True):
            raise UserError("AWQ without zero points is not supported")
        return Awq(group_size)

    def linear(self, tensors: Source, module: str, rows: int, columns: int, bias: Tensor | None) -> Int4Weight:
        words, count = (torch.int32,), groups(tensors, module, rows, columns, self.group_size)
        qweight = tensors.take(f"{module}.qweight", columns, rows // 8, kinds=words)
        qzeros = tensors.take(f"{module}.qzeros", count, rows // 8, kinds=words)
        return from_awq(qweight, qzeros, tensors.take(f"{module}.scales", count, rows), self.group_size, bias)
