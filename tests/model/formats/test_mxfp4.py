"""MXFP4 weights: the values, parts of a matrix, and a gpt-oss whose experts have this format."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from swiftspec.backends.cpu import cpu
from swiftspec.backends.cpu.packed_weight_cache import PackedWeightCache
from swiftspec.backends.reference import reference
from swiftspec.backends.unfused import unfused
from swiftspec.errors import UserError
from swiftspec.model.checkpoint_files import open_tensors
from swiftspec.model.formats.mxfp4 import Mxfp4, Mxfp4Weight
from swiftspec.model.loader import load_model
from swiftspec.model.weights import DenseWeight
from tests.model.architectures.test_families import logits
from tests.model.architectures.test_native_families import TOKENS as NATIVE_TOKENS
from tests.model.architectures.test_native_families import logits as native_logits
from tests.model.architectures.test_native_families import new_cache
from tests.model.test_loader import WEIGHTS, change_config
from tests.support.memory_tensors import MemoryTensors
from tests.support.thread_group import on_ranks
from tests.support.tiny_checkpoints import chain, make_checkpoint

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
EXPERTS, ROWS, COLUMNS = 3, 24, 96
native = pytest.mark.skipif(cpu.level() == "none", reason="there are no native operators here")
CONFIG: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


def random_mxfp4(experts: int, rows: int, columns: int, low: int = 118, high: int = 126) -> tuple[Tensor, Tensor]:
    """Blocks and scales of random matrices. `low`, `high`: range of the stored exponents."""
    draw = torch.Generator().manual_seed(experts * rows * columns)
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=draw, dtype=torch.uint8)
    return blocks, torch.randint(low, high, blocks.shape[:3], generator=draw, dtype=torch.uint8)


def theirs(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrices as transformers dequantises them, [experts * rows, columns]."""
    return convert_moe_packed_tensors(blocks, scales, dtype=dtype).mT.flatten(0, 1)


def weight_of(blocks: Tensor, scales: Tensor, bias: Tensor | None = None) -> Mxfp4Weight:
    tensors = MemoryTensors({"m_blocks": blocks, "m_scales": scales})
    rows, columns = blocks.shape[0] * blocks.shape[1], 32 * blocks.shape[2]
    return Mxfp4.of(CONFIG).linear(tensors, "m", rows, columns, bias)


@pytest.mark.parametrize("dtype", [BF16, F32, F64])
def test_values_equal_those_of_transformers(dtype: torch.dtype) -> None:
    for low, high in ((118, 126), (2, 253)):
        blocks, scales = random_mxfp4(EXPERTS, ROWS, COLUMNS, low, high)
        weight = weight_of(blocks, scales)
        assert weight.shape == (EXPERTS * ROWS, COLUMNS) and weight.product("cpu") is None
        assert torch.equal(weight.dequantize(dtype), theirs(blocks, scales, dtype))
        assert torch.equal(weight.unpacked().dequantize(dtype), theirs(blocks, scales, dtype))


def test_every_code() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    blocks = (codes[::2] | codes[1::2] << 4).view(1, 1, 1, 16)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    want = torch.cat((values, -values)).repeat(2) * 4
    assert torch.equal(weight_of(blocks, torch.full((1, 1, 1), 129, dtype=torch.uint8)).dequantize(F32)[0], want)


def test_parts_of_a_matrix() -> None:
    weight = weight_of(*random_mxfp4(EXPERTS, ROWS, COLUMNS), bias=torch.arange(float(EXPERTS * ROWS)))
    dense = DenseWeight(weight.dequantize(F32), weight.bias)

    def same(one: Any, other: Any) -> None:
        assert torch.equal(one.dequantize(F32), other.dequantize(F32)) and torch.equal(one.bias, other.bias)

    rows = torch.tensor([5, -1, 0, 70, 3])
    same(weight.outputs(rows), dense.outputs(rows))
    for run in (32, 8):
        columns = torch.cat((torch.arange(64, 96), torch.full((8,), -1), torch.arange(8)))
        columns = columns if run == 8 else torch.cat((columns[:32], torch.full((32,), -1)))
        part = weight.inputs(columns, run)
        assert isinstance(part, Mxfp4Weight if run == 32 else DenseWeight)
        same(part, dense.inputs(columns, run))
    both = torch.cat((weight.bias, weight.bias)) if weight.bias is not None else None
    same(weight.stack([weight], both), dense.stack([dense], both))


def test_invalid_tensors_are_refused(tmp_path: Path) -> None:
    blocks, scales = random_mxfp4(EXPERTS, ROWS, COLUMNS)
    layout, size = Mxfp4.of(CONFIG), EXPERTS * ROWS

    def refused(message: str, columns: int = COLUMNS, **changed: Tensor) -> None:
        with pytest.raises(UserError, match=message):
            tensors = {"m_blocks": blocks, "m_scales": scales} | changed
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / WEIGHTS)
            layout.linear(open_tensors(tmp_path), "m", size, columns, None)

    refused(r"m \[72, 80\] cannot be divided into MXFP4 groups", columns=80)
    refused(r"m \[72, 96\] cannot be divided into MXFP4 groups", m_blocks=blocks[:0])
    refused("m_blocks", m_blocks=blocks[..., :8])
    refused("m_scales", m_scales=scales[:, :8])
    refused("m_scales", m_scales=scales.float())


def pack_experts(path: Path) -> Path:
    """Gives the experts of a gpt-oss checkpoint random MXFP4 matrices. Returns a twin with the dequantised ones, in
    tensors as transformers writes them."""
    twin = Path(shutil.copytree(path, path.parent / "twin"))
    packed, dense = load_file(path / WEIGHTS), load_file(path / WEIGHTS)
    for name in [name for name in packed if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = packed.pop(name).shape
        blocks, scales = random_mxfp4(experts, rows, columns)
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = blocks, scales
        dense[name] = convert_moe_packed_tensors(blocks, scales, dtype=dense[name].dtype)
    save_file(packed, path / WEIGHTS)
    save_file(dense, twin / WEIGHTS)
    change_config(path, quantization_config=CONFIG)
    return twin


def test_a_model_with_packed_experts(tmp_path: Path) -> None:
    """On one rank, and on ranks that have whole groups of the inner dimension, or padding."""
    path = tmp_path / "model"
    make_checkpoint(path, family="gpt_oss", dtype=F64, intermediate_size=64)
    want = logits(pack_experts(path), reference)
    for ops in (reference, unfused):
        torch.testing.assert_close(logits(path, ops), want, rtol=0, atol=1e-9)
    for size in (2, 3):
        ranks = on_ranks(size, lambda group: logits(path, reference, group))
        assert all(torch.equal(each, ranks[0]) for each in ranks)
        torch.testing.assert_close(ranks[0], want, rtol=0, atol=1e-9)


@native
@pytest.mark.parametrize("rounded", [False, True], ids=["float", "int8 activations"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_native_products(level: str, dtype: torch.dtype, rounded: bool) -> None:
    """Bitwise those of the same matrix with int8 codes, and close to the exact ones. The last block of outputs is not
    full, and a zero weight has any exponent."""
    blocks, scales = random_mxfp4(EXPERTS, ROWS, COLUMNS)
    blocks[0, 3], scales[0, 3], scales[0, 4] = 0, 255, 0
    bias = torch.randn(EXPERTS * ROWS, generator=torch.Generator().manual_seed(2))
    weight = replace(weight_of(blocks, scales, bias), int8_activations=rounded)
    packed, int8 = cpu.pack(weight, dtype, "cpu"), cpu.pack(weight.unpacked(), dtype, "cpu")
    assert packed.data.shape == (5, COLUMNS // 8, 16) and int8.data.shape == (5, COLUMNS // 4, 16)
    x = torch.randn(40, COLUMNS, generator=torch.Generator().manual_seed(1)).to(dtype)
    for rows in (1, 3, 13, 40):
        mine = x[:rows]
        ours = cpu.norm_linear(mine, None, packed)
        assert torch.equal(ours, cpu.norm_linear(mine, None, int8))
        exact = mine.double() @ weight.dequantize(F64).T + bias
        assert float((ours - exact).norm() / exact.norm()) < (2e-2 if rounded else 4e-3 if dtype == BF16 else 1e-6)


@native
def test_a_native_model(tmp_path: Path) -> None:
    """In float32 as exact as the operators are; in bfloat16 a row's bits do not depend on the other rows. On two
    ranks each has whole groups of every expert. The packed weights are mapped at the next start."""
    path, whole = tmp_path / "model", [70]
    make_checkpoint(path, family="gpt_oss", dtype=F32, head_dim=16, hidden_size=64, intermediate_size=64, vocab=65)
    pack_experts(path)
    exact = native_logits(path, reference, F64, whole)
    one, two = on_ranks(2, lambda group: native_logits(path, cpu, F32, whole, group=group))
    assert torch.equal(one, two)
    for ours in (one, native_logits(path, cpu, F32, whole)):
        assert float((ours - exact).norm()) < 1e-5 * float(exact.norm())
    ours = native_logits(path, cpu, BF16, whole)
    assert torch.equal(native_logits(path, cpu, BF16, [30, *range(31, 50), 70]), ours)
    assert torch.equal(native_logits(path, cpu, BF16, whole, fused=False), ours)
    written = list[dict[Path, int]]()
    for _ in range(2):
        cache = PackedWeightCache(tmp_path / "cache", min_model_bytes=0)
        model = load_model(path, dtype=BF16, ops=cpu, max_positions=96, packed_cache=cache)
        cache.writer.resume()
        cache.writer.close(60.0)
        written.append({file: file.stat().st_mtime_ns for file in (tmp_path / "cache").glob("*/*")})
        logits_now = model.forward(chain(NATIVE_TOKENS), new_cache(model, cpu)).logits
        assert logits_now is not None and torch.equal(logits_now, ours)
    assert written[0] == written[1] and len(written[0]) == 5, "three layers, embedding and head"
