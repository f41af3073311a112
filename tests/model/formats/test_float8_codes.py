"""Float8 weights: the values, per tensor, per output and in blocks, in DeepSeek's and compressed-tensors' formats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec.errors import UserError
from swiftspec.model.formats.compressed_tensors import CompressedTensors
from swiftspec.model.formats.float8_codes import E4M3, Float8, Float8Weight
from swiftspec.model.weights import fuse_weights
from tests.support.memory_tensors import MemoryTensors

ROWS, COLUMNS = 40, 96
SCALES = {  # shape of the scale, by the numbers of outputs and inputs that share one
    "tensor": ((), ROWS, COLUMNS), "one": ((1,), ROWS, COLUMNS), "output": ((ROWS, 1), 1, COLUMNS),
    "block": ((3, 3), 16, 40),
}  # fmt: skip


def matrix(kind: str, name: str = "weight_scale") -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a matrix, and its values."""
    shape, by_rows, by_columns = SCALES[kind]
    draw = torch.Generator().manual_seed(0)
    codes = torch.randn(ROWS, COLUMNS, generator=draw).to(E4M3)
    scale = 0.5 + torch.rand(shape, generator=draw)
    spread = scale.reshape(-1, scale.shape[1] if scale.ndim == 2 else 1)
    spread = spread.repeat_interleave(by_rows, 0)[:ROWS].repeat_interleave(by_columns, 1)[:, :COLUMNS]
    return {"m.weight": codes, f"m.{name}": scale}, codes.float() * spread


def test_blocks_as_in_deepseek() -> None:
    tensors, want = matrix("block", "weight_scale_inv")
    layout = Float8.of({"quant_method": "fp8", "weight_block_size": [16, 40], "activation_scheme": "dynamic"})
    weight = layout.linear(MemoryTensors(tensors), "m", ROWS, COLUMNS, None)
    assert layout.group_size == 40 and torch.equal(weight.dequantize(torch.float32), want)
    assert torch.equal(weight.dequantize(torch.bfloat16), want.bfloat16()) and weight.product("cpu") is None


@pytest.mark.parametrize("name", ["input_scale", "input_scale_ub", "activation_scale", "input_activation_scale"])
def test_static_scales_of_activations_are_ignored(name: str) -> None:
    tensors, want = matrix("tensor", "weight_scale_inv")
    source = MemoryTensors({**tensors, f"m.{name}": torch.ones(())})
    layout = Float8.of({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None})
    weight = layout.linear(source, "m", ROWS, COLUMNS, None)
    assert torch.equal(weight.dequantize(torch.float32), want) and source.tensors.keys() == tensors.keys()


@pytest.mark.parametrize("kind", ["tensor", "one", "output"])
def test_a_scale_per_tensor_or_output(kind: str) -> None:
    tensors, want = matrix(kind)
    weight = Float8.of({"quant_method": "fp8"}).linear(MemoryTensors(tensors), "m", ROWS, COLUMNS, None)
    assert torch.equal(weight.dequantize(torch.float32), want)


@pytest.mark.parametrize(("kind", "strategy"), [("one", "tensor"), ("output", "channel"), ("block", "block")])
def test_compressed_tensors(kind: str, strategy: str) -> None:
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    weights["block_structure"] = [16, 40] if strategy == "block" else None
    group = {"weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    layout = CompressedTensors.of({"format": "float-quantized", "config_groups": {"group_0": group}})
    tensors, want = matrix(kind)
    weight = layout.linear(MemoryTensors(tensors), "m", ROWS, COLUMNS, None)
    assert isinstance(weight, Float8Weight) and torch.equal(weight.dequantize(torch.float32), want)


def test_shards_and_stacks() -> None:
    tensors, values = matrix("block")
    weight = Float8((16, 40)).linear(MemoryTensors(tensors), "m", ROWS, COLUMNS, torch.arange(ROWS).float())
    fused = fuse_weights([weight, weight])
    dense = F.pad(torch.cat((values, values)), (0, 1, 0, 1))
    rows = torch.cat((torch.arange(38, 44), torch.full((2,), -1)))
    columns = torch.cat((torch.arange(24, 72), torch.full((24,), -1)))
    assert torch.equal(fused.outputs(rows).dequantize(torch.float32), dense[rows][:, :-1])
    assert torch.equal(fused.inputs(columns, 24).dequantize(torch.float32), dense[:-1][:, columns])
    assert fused.bias is not None and len(fused.bias) == 2 * ROWS


def test_other_formats_are_refused() -> None:
    with pytest.raises(UserError, match="KV cache"):
        Float8.of({"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}})
