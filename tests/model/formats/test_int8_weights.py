"""Int8 weights of compressed-tensors, and the native product with activations that are not quantised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cpu.packing import pack
from swiftspec.model.formats.compressed_tensors import CompressedTensors
from swiftspec.model.formats.int8 import Int8Weight, LoadTimeQuantization
from swiftspec.model.weights import DenseWeight, LayerWeights, ModelWeights
from tests.support.memory_tensors import MemoryTensors

ROWS, COLUMNS = 40, 192
NATIVE = pytest.mark.skipif(_C.level() == "none", reason="this CPU has no AVX2")


def reader(layout: str, strategy: str) -> CompressedTensors:
    weights: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy}
    return CompressedTensors.of({"format": layout, "config_groups": {"group_0": {"weights": weights}}})


def matrix(layout: str, groups: int) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a matrix, and its values."""
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (ROWS, COLUMNS), generator=draw).to(torch.int8)
    scales = (torch.rand(ROWS, groups, generator=draw) / 100).bfloat16()
    values = codes.float() * scales.float().repeat_interleave(COLUMNS // groups, 1)
    if layout == "int-quantized":
        return {"m.weight": codes, "m.weight_scale": scales}, values
    words = (codes.view(torch.uint8) ^ 128).view(torch.int32)
    shape = torch.tensor([ROWS, COLUMNS])
    return {"m.weight_packed": words, "m.weight_scale": scales, "m.weight_shape": shape}, values


@pytest.mark.parametrize("layout", ["pack-quantized", "int-quantized"])
@pytest.mark.parametrize(("strategy", "groups"), [("channel", 1), ("group", 6)])
def test_values(layout: str, strategy: str, groups: int) -> None:
    tensors, want = matrix(layout, groups)
    weight = reader(layout, strategy).linear(MemoryTensors(tensors), "m", ROWS, COLUMNS, None)
    assert isinstance(weight, Int8Weight) and weight.group_size == (64 if groups == 1 else 32)
    assert torch.equal(weight.dequantize(torch.float32), want) and weight.product("cpu") is None


@NATIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("minima", [False, True])
def test_the_native_product(dtype: torch.dtype, minima: bool) -> None:
    """Of up to six rows, so that all tile sizes run; each row alone gives the same bits."""
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (ROWS, COLUMNS), generator=draw).to(torch.int8)
    scales, lowest = torch.rand(2, ROWS, COLUMNS // 16, generator=draw) / 100
    weight = Int8Weight(codes, scales, torch.ones(ROWS), lowest if minima else None, int8_activations=0)
    packed, x = pack(weight, dtype, "cpu"), torch.randn(6, COLUMNS, generator=draw).to(dtype)
    want = F.linear(x.float(), weight.dequantize(torch.float32), torch.ones(ROWS))
    for rows in range(1, 7):
        out, alone = x.new_empty(rows, ROWS), x.new_empty(1, ROWS)
        _C.linear(packed.native, x[:rows], None, 0.0, None, out, "none", 1.0, 0.0)
        _C.linear(packed.native, x[rows - 1 : rows], None, 0.0, None, alone, "none", 1.0, 0.0)
        torch.testing.assert_close(out.float(), want[:rows], rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)
        assert torch.equal(out[rows - 1 :], alone)


def test_activations_are_quantised_on_request() -> None:
    weight = Int8Weight(torch.ones(8, 32, dtype=torch.int8), torch.ones(8, 1), int8_activations=0)
    norm, dense = torch.ones(8), DenseWeight(torch.ones(8, 32))
    layer = LayerWeights(norm, weight, weight, norm, weight, dense)
    weights = LoadTimeQuantization(activations=1).of_weights(ModelWeights(norm, [lambda: layer], norm, lambda: weight))
    read = weights.layers[0]()
    assert isinstance(read.qkv, Int8Weight) and read.qkv.int8_activations and read.down is dense
    head = weights.head()
    assert isinstance(head, Int8Weight) and head.int8_activations
