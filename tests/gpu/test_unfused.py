"""Operators of torch that backends/unfused uses on a GPU and not on a CPU: int4 products, attention, sums of ranks."""

from __future__ import annotations

import pytest
import torch

from swiftspec.backends.reference import reference
from swiftspec.backends.unfused import unfused
from swiftspec.distributed.collectives.torch_dist import sum_in_rank_order
from swiftspec.model.batch import Batch
from swiftspec.model.formats.int4 import Int4Weight, pack_int4
from tests.backends.test_unfused import Cache, batch_of

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("head_dim", "kv_len"), [(32, 20), (64, 256), (96, 300), (128, 599), (60, 40)])
def test_attention(dtype: torch.dtype, head_dim: int, kv_len: int) -> None:
    """Heads of 60 in 16 bits have no memory-efficient kernel, nor has float64."""
    batch = batch_of(kv_len, 8, [kv_len - 3, kv_len - 1], kv_len)
    (cos, sin), cached = torch.randn(2, 640, head_dim), torch.randn(2, 1, 1, 2, 600, head_dim)
    qkv, exact, found = torch.randn(2, 10 * head_dim), Cache(*cached.double()), Cache(*cached.cuda().to(dtype))
    want = reference.tree_attention(qkv.double(), reference.prepare(batch, exact, cos.double(), sin.double(), 6), 0)
    parts = (batch.tokens, batch.positions, batch.slots, batch.mask, batch.sequence, batch.kv_len)
    placed = Batch(*(part.cuda() for part in parts), max_kv_len=kv_len)
    plan = unfused.prepare(placed, found, cos.cuda().to(dtype), sin.cuda().to(dtype), 6)
    got = unfused.tree_attention(qkv.cuda().to(dtype), plan, 0).cpu().double()
    assert (got - want).norm() <= 5e-2 * want.norm()


@pytest.mark.parametrize("size", [2, 3, 6, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_have_the_bits_of_the_cpu(size: int, dtype: torch.dtype) -> None:
    parts = (torch.randn(size, 8, 4096) * 100).to(dtype)
    assert torch.equal(sum_in_rank_order(parts.cuda()).cpu(), sum_in_rank_order(parts))
