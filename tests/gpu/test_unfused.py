"""int4 products of backends/unfused on a GPU, where torch has other operators and another packing than on a CPU."""

from __future__ import annotations

import pytest
import torch

from swiftspec.backends import unfused
from swiftspec.model.formats.int4 import Int4Weight, pack_int4

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]


@pytest.mark.parametrize("rows", [1, 8, 33, 256])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(96, 256, 32), (1024, 2048, 128)])
def test_int4_products(outputs: int, inputs: int, group: int, rows: int) -> None:
    codes = torch.randint(0, 16, (inputs, outputs), dtype=torch.uint8)
    zeros = torch.randint(0, 16, (inputs // group, outputs), dtype=torch.uint8)
    scales = torch.rand(inputs // group, outputs).add(0.5).half()
    weight = Int4Weight(pack_int4(codes), scales, pack_int4(zeros), group, torch.randn(outputs))
    x = torch.randn(rows, inputs).bfloat16()
    assert weight.bias is not None
    want = x.double() @ weight.dequantize(torch.float64).T + weight.bias.double()
    got = unfused.pack(weight, torch.bfloat16, "cuda")(x.cuda()).cpu().double()
    assert (got - want).norm() <= 1e-2 * want.norm()  # scales of 8 bits
