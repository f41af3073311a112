"""GGML's quantised blocks: exactly the values that the package `gguf` computes, in every operation on a weight."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cpu.packing import pack
from swiftspec.errors import UserError
from swiftspec.model.formats.blocks import BLOCK_TYPES, Blocks, BlockType, BlockWeight
from swiftspec.model.formats.int8 import Int8Weight
from swiftspec.model.weights import fuse_weights
from tests.support.gguf_files import random_blocks
from tests.support.memory_tensors import MemoryTensors

ROWS, COLUMNS = 40, 512
BY_NAME = pytest.mark.parametrize("kind", BLOCK_TYPES.values(), ids=BLOCK_TYPES)
NATIVE = pytest.mark.skipif(_C.level() == "none", reason="this CPU has no AVX2")


def weight_of(kind: BlockType, rows: int = ROWS, seed: int = 0) -> BlockWeight:
    raw = random_blocks(kind, rows, COLUMNS, np.random.default_rng(seed))
    return BlockWeight(torch.from_numpy(raw), kind, bias=torch.arange(rows) / 8)


def values_of(weight: BlockWeight) -> Tensor:
    return torch.from_numpy(gguf.dequantize(weight.rows.numpy(), GGMLQuantizationType[weight.kind.name]))


@BY_NAME
def test_values(kind: BlockType) -> None:
    weight = weight_of(kind)
    want = values_of(weight)
    assert weight.shape == want.shape == (ROWS, COLUMNS)
    assert torch.equal(weight.dequantize(torch.float32), want)
    assert torch.equal(weight.dequantize(torch.float64), want.double())
    assert torch.equal(weight.dequantize(torch.bfloat16), want.bfloat16())
    assert torch.equal(weight.unpacked().dequantize(torch.float32), want)


@BY_NAME
def test_every_bit_of_a_block_counts(kind: BlockType) -> None:
    """Blocks with each single bit set, with ones as the two halves."""
    raw = np.zeros((8 * kind.bytes, kind.bytes), dtype=np.uint8)
    raw[np.arange(len(raw)), np.arange(len(raw)) // 8] = 1 << np.arange(len(raw)) % 8
    halves = {0, 1} if kind.name != "Q6_K" else {208, 209}
    if kind.minima:
        halves |= {2, 3}
    chosen = [row for row in range(len(raw)) if row // 8 not in halves]
    for at in sorted(halves)[::2]:
        raw[:, at : at + 2] = np.array([1.0], np.float16).view(np.uint8)
    if kind.name in ("Q4_K", "Q5_K", "Q6_K"):  # scales that are not zero, so that codes show
        raw[:, 4:16] |= 1 if kind.name != "Q6_K" else 0
        raw[:, 192:208] |= 1
    weight = BlockWeight(torch.from_numpy(raw[chosen]), kind)
    assert torch.equal(weight.dequantize(torch.float32), values_of(weight))


@BY_NAME
def test_shards(kind: BlockType) -> None:
    weight = weight_of(kind)
    dense = F.pad(values_of(weight), (0, 1, 0, 1))
    rows = torch.cat((torch.arange(8, 24), torch.full((8,), -1)))
    part = weight.outputs(rows)
    assert isinstance(part, BlockWeight) and part.bias is not None and weight.bias is not None
    assert torch.equal(part.dequantize(torch.float32), dense[rows][:, :-1])
    assert torch.equal(part.bias, F.pad(weight.bias, (0, 1))[rows])
    for run in (kind.inputs, 16):  # whole blocks, and less than a block
        columns = torch.cat((torch.arange(COLUMNS - run, COLUMNS), torch.full((run,), -1)))
        cut = weight.inputs(columns, run)
        assert isinstance(cut, BlockWeight if run == kind.inputs else Int8Weight)
        assert torch.equal(cut.dequantize(torch.float32), dense[:-1][:, columns])


def test_matrices_of_one_type_stay_blocks_and_those_of_several_become_int8() -> None:
    same = [weight_of(BLOCK_TYPES["Q4_K"], 8, seed) for seed in (1, 2)]
    other = weight_of(BLOCK_TYPES["Q6_K"], 8)
    fused, mixed = fuse_weights(same), fuse_weights([*same, other])
    assert isinstance(fused, BlockWeight) and isinstance(mixed, Int8Weight) and mixed.group_size == 16
    want = torch.cat([values_of(weight) for weight in (*same, other)])
    assert torch.equal(fused.dequantize(torch.float32), want[:16]) and torch.equal(
        mixed.dequantize(torch.float32), want
    )
    assert torch.equal(fused.outputs(torch.arange(4, 12)).dequantize(torch.float32), want[4:12])


@NATIVE
@BY_NAME
@pytest.mark.parametrize("rounded", [False, True], ids=["native activations", "int8 activations"])
def test_the_native_product(kind: BlockType, rounded: bool) -> None:
    """Packed from the blocks, and from the same matrix with int8 codes; with stacked parts of odd sizes."""
    weight = fuse_weights([replace(weight_of(kind, rows), int8_activations=rounded) for rows in (ROWS, 7)])
    assert isinstance(weight, BlockWeight) and weight.bias is not None
    x = torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(0))
    dense = (x.double() @ weight.dequantize(torch.float64).T + weight.bias.double()).float()
    own = weight.product("cpu")
    assert (own is not None) == rounded
    for source in (weight, weight.unpacked()):
        packed, out = pack(source, torch.float32, "cpu"), torch.empty(5, ROWS + 7)
        _C.linear(packed.native, x, None, 0.0, None, out, "none", 1.0, 0.0)
        if own is None:
            torch.testing.assert_close(out, dense, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(out, own(x))
    if own is not None:
        torch.testing.assert_close(own(x), dense, rtol=0.05, atol=0.05)


def test_a_safetensors_checkpoint_with_this_method_is_refused() -> None:
    with pytest.raises(UserError, match="quantisation method 'gguf' occurs in GGUF files only"):
        Blocks.of({}).linear(MemoryTensors({}), "m", 8, 32, None)
