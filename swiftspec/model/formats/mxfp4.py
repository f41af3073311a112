"""MXFP4 weights: w = v * 2^e, where v is a float4 e2m1 number, and e the exponent of its group of 32 inputs (OCP
Microscaling formats)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swiftspec.errors import UserError
from swiftspec.file_io import Fields
from swiftspec.model.checkpoint import Source
from swiftspec.model.config_json import Json
from swiftspec.model.formats.int8 import Int8Weight
from swiftspec.model.weights import DenseWeight, select

GROUP = 32  # inputs per exponent
GROUP_BYTES = GROUP // 2  # two codes per byte, that of the first input in the lower half
EXPONENT_BIAS = 127
# twice the value of each code: a sign, two exponent bits and one mantissa bit
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
STRIP_ROWS = 4096  # rows that are converted at a time, because intermediates are larger


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """Matrix with float4 codes as they are in the file. In shapes, groups = inputs / 32."""

    codes: Tensor  # [outputs, groups, 16] uint8
    exponents: Tensor  # [outputs, groups] uint8, e + 127
    bias: Tensor | None = None  # [outputs]
    int8_activations: int = 0  # int8 numbers to which the product quantises an activation: 0, 1 or 2

    @property
    def shape(self) -> tuple[int, int]:
        outputs, groups = self.exponents.shape
        return outputs, GROUP * groups

    def unpacked(self) -> Int8Weight:
        """Returns the same matrix with int8 codes, which are 2 v, and the scales 2^(e - 1). Every scale is exact in
        float32 and in bfloat16."""
        device = self.codes.device
        doubled = torch.tensor(DOUBLED, dtype=torch.int8, device=device)
        both = torch.stack((doubled.repeat(16), doubled.repeat_interleave(16)), 1)  # codes of each byte, [256, 2]
        codes = torch.empty(self.shape, dtype=torch.int8, device=device)
        for start in range(0, len(codes), STRIP_ROWS):
            rows = slice(start, start + STRIP_ROWS)
            codes[rows] = both.index_select(0, self.codes[rows].flatten().int()).view(codes[rows].shape)
        powers = torch.ldexp(torch.ones(256, device=device), torch.arange(256, device=device) - (EXPONENT_BIAS + 1))
        scales = powers.to(torch.bfloat16)[self.exponents.int()]
        return Int8Weight(codes, scales, self.bias, int8_activations=self.int8_activations)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns the dense matrix [outputs, inputs] in `dtype`: v 2^e, rounded once."""
        dense = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        for start in range(0, len(dense), STRIP_ROWS):
            rows = slice(start, start + STRIP_ROWS)
            part = Mxfp4Weight(self.codes[rows], self.exponents[rows])
            dense[rows] = part.unpacked().dequantize(torch.float32)
        return dense

    def product(self, device: torch.device | str) -> Callable[[Tensor], Tensor] | None:
        """Returns the product with int8 activations, or None if `int8_activations` is not set; see `Weight.product`."""
        return self.unpacked().product(device)

    def outputs(self, index: Tensor) -> Mxfp4Weight:
        """See `Weight.outputs`. The code 0 is 0."""
        bias = None if self.bias is None else select(self.bias, 0, index)
        return replace(self, codes=select(self.codes, 0, index), exponents=select(self.exponents, 0, index), bias=bias)

    def inputs(self, index: Tensor, run: int) -> Mxfp4Weight | DenseWeight:
        """See `Weight.inputs`. A matrix whose groups a run would divide becomes dense."""
        if run % GROUP:
            return DenseWeight(self.dequantize(torch.float32), self.bias).inputs(index, run)
        groups = torch.div(index[::GROUP], GROUP, rounding_mode="floor")
        return replace(self, codes=select(self.codes, 1, groups), exponents=select(self.exponents, 1, groups))

    def stack(self, others: Sequence[Mxfp4Weight], bias: Tensor | None) -> Mxfp4Weight:
        parts = (self, *others)
        codes, exponents = torch.cat([part.codes for part in parts]), torch.cat([part.exponents for part in parts])
        return replace(self, codes=codes, exponents=exponents, bias=bias)


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Reader of the MXFP4 matrices of gpt-oss: those of all experts in the tensors "MODULE_blocks" and
    "MODULE_scales"."""

    @property
    def group_size(self) -> int:
        return GROUP

    @property
    def is_int4(self) -> bool:
        return False

    @staticmethod
    def of(data: Json) -> Mxfp4:
        """Parses config.json's `quantization_config` of method "mxfp4". Its `modules_to_not_convert` are those whose
        tensors are dense."""
        Fields(data, "quantization_config.").strings("modules_to_not_convert")
        return Mxfp4()

    def linear(self, tensors: Source, module: str, rows: int, columns: int, bias: Tensor | None) -> Mxfp4Weight:
        """Reads the matrices of all experts, one below the other."""
        found = tensors.shape_of(f"{module}_blocks")
        experts = found[0] if found else 0
        if experts == 0 or rows % experts or columns % GROUP:
            raise UserError(f"{tensors.folder}: {module} [{rows}, {columns}] cannot be divided into MXFP4 groups")
        shape, kinds = (experts, rows // experts, columns // GROUP), (torch.uint8,)
        codes = tensors.take(f"{module}_blocks", *shape, GROUP_BYTES, kinds=kinds).flatten(0, 1)
        exponents = tensors.take(f"{module}_scales", *shape, kinds=kinds).flatten(0, 1)
        return Mxfp4Weight(codes, exponents, bias)
