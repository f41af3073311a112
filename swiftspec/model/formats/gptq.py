"""GPTQ's formats of int4 weights, as AutoGPTQ and GPTQModel write them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swiftspec.errors import UserError, truncated_repr
from swiftspec.file_io import Fields
from swiftspec.model.checkpoint import Source
from swiftspec.model.config_json import Json
from swiftspec.model.formats.int4 import Int4Weight, check, groups, pack_int4, unpack_int4

LAYOUTS = {"gptq": 1, "gptq_v2": 0}  # what is added to the stored zero points, by `checkpoint_format`
WHOLE_INPUT_GROUP = 128  # inputs per group into which a group of all inputs is split
ONES = 0x11111111  # eight nibbles of 1
LOW_BITS = 0x77777777  # of eight nibbles, all but the highest bit


def from_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    group_size: int,
    bias: Tensor | None = None,
    *,
    order: Tensor | None = None,
    zero_offset: int = 1,
) -> Int4Weight:
    """Creates a weight from qweight [inputs / 8, outputs], qzeros [groups, outputs / 8] and scales [groups, outputs],
    where groups = inputs / `group_size`.

    `order`: [inputs] int64, the inputs sorted by group ("activation order"); None: they are sorted already.
    `zero_offset`: what is added to the stored zero points, modulo 16.
    """
    zeros = _add_one(qzeros) if zero_offset else qzeros
    if order is not None:
        codes = unpack_int4(qweight.T).T.index_select(0, order)  # [inputs, outputs]
        qweight = pack_int4(codes.T.contiguous()).T.contiguous()
    return Int4Weight(qweight, scales, zeros, group_size, bias, order="gptq", permutation=order)


def _add_one(words: Tensor) -> Tensor:
    """Adds 1 to each nibble of int32 words, modulo 16."""
    highest = words & ~LOW_BITS
    return ((words & LOW_BITS) + ONES) ^ highest


def input_order(tensors: Source, name: str, columns: int, count: int) -> Tensor | None:
    """Returns the inputs sorted by group, [columns] int64, from the tensor `name`, which has the group of each input.
    Returns None if there is no such tensor, or if the inputs are in this order. Raises UserError if they are not
    divided into `count` groups of equal size."""
    if name not in tensors:
        return None
    group_of = tensors.take(name, columns, kinds=(torch.int32, torch.int64)).long()
    sorted_groups, order = group_of.sort(stable=True)
    if not torch.equal(sorted_groups, torch.arange(columns) // (columns // count)):
        raise UserError(f"{tensors.folder}: {name} does not divide the inputs into groups of equal size")
    return None if torch.equal(order, torch.arange(columns)) else order


@dataclass(frozen=True, slots=True)
class Gptq:
    """Reader of GPTQ matrices."""

    inputs_per_scale: int  # -1: all inputs
    zero_offset: int  # added to the stored zero points

    @property
    def group_size(self) -> int:
        return WHOLE_INPUT_GROUP if self.inputs_per_scale < 0 else self.inputs_per_scale

    @property
    def is_int4(self) -> bool:
        return True

    @staticmethod
    def of(data: Json) -> Gptq:
        """Parses config.json's `quantization_config`. Raises UserError if a feature is not supported."""
        fields = Fields(data, "quantization_config.")
        layout = fields.string("checkpoint_format", "gptq")
        if layout not in LAYOUTS:
            raise UserError(
                f"GPTQ format {truncated_repr(layout)} is not supported; {' and '.join(map(repr, LAYOUTS))} are"
            )
        group_size, bits = fields.integer("group_size", 128), fields.integer("bits", 4)
        size = check("GPTQ", bits, WHOLE_INPUT_GROUP if group_size == -1 else group_size)
        return Gptq(-1 if group_size == -1 else size, LAYOUTS[layout])

    def linear(self, tensors: Source, module: str, rows: int, columns: int, bias: Tensor | None) -> Int4Weight:
        words, count = (torch.int32,), groups(tensors, module, rows, columns, self.group_size)
        stored = 1 if self.inputs_per_scale < 0 else count
        qweight = tensors.take(f"{module}.qweight", columns // 8, rows, kinds=words)
        qzeros = tensors.take(f"{module}.qzeros", stored, rows // 8, kinds=words)
        scales = tensors.take(f"{module}.scales", stored, rows)
        order = input_order(tensors, f"{module}.g_idx", columns, stored)
        if stored != count:
            qzeros, scales = qzeros.expand(count, -1), scales.expand(count, -1)
        return from_gptq(qweight, qzeros, scales, self.group_size, bias, order=order, zero_offset=self.zero_offset)
