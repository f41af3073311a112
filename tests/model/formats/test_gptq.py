"""GPTQ: the values of its packed matrices, with and without activation order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cpu.packing import pack
from swiftspec.backends.unfused import unfused
from swiftspec.errors import UserError
from swiftspec.model.formats.gptq import Gptq, from_gptq
from swiftspec.model.formats.int4 import Int4Weight, pack_int4, unpack_int4
from swiftspec.model.weights import DenseWeight, fuse_weights
from tests.support.memory_tensors import MemoryTensors

ROWS, COLUMNS, GROUP = 48, 256, 64
NATIVE = pytest.mark.skipif(_C.level() == "none", reason="this CPU has no AVX2")


def matrix(
    seed: int = 0, *, group: int = GROUP, ordered: bool = True, offset: int = 1
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a matrix as AutoGPTQ packs them, and its values."""
    draw = torch.Generator().manual_seed(seed)
    count = COLUMNS // group
    codes = torch.randint(0, 16, (COLUMNS, ROWS), generator=draw)
    zeros = torch.randint(0, 16, (count, ROWS), generator=draw)
    scales = (0.01 + torch.rand(count, ROWS, generator=draw) / 50).half()
    index = torch.arange(COLUMNS) // group
    if not ordered:
        index = index[torch.randperm(COLUMNS, generator=draw)]
    values = (codes - zeros[index]) * scales.float()[index]
    tensors = {
        "m.qweight": pack_int4(codes.T.contiguous().to(torch.uint8)).T.contiguous(),
        "m.qzeros": pack_int4(((zeros - offset) % 16).to(torch.uint8)),
        "m.scales": scales,
        "m.g_idx": index.to(torch.int32),
    }
    return tensors, values.T


def read(tensors: dict[str, Tensor], group: int = GROUP, offset: int = 1) -> Int4Weight:
    return Gptq(group, offset).linear(MemoryTensors(tensors), "m", ROWS, COLUMNS, None)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("offset", [1, 0])
def test_values(ordered: bool, offset: int) -> None:
    tensors, want = matrix(ordered=ordered, offset=offset)
    weight = read(tensors, offset=offset)
    assert weight.shape == (ROWS, COLUMNS) and (weight.permutation is None) == ordered
    torch.testing.assert_close(weight.dequantize(torch.float32), want, rtol=1e-6, atol=1e-6)


def test_one_group_of_all_inputs() -> None:
    tensors, want = matrix(group=COLUMNS)
    weight = read(tensors, -1)
    assert weight.group_size == 128
    torch.testing.assert_close(weight.dequantize(torch.float32), want, rtol=1e-6, atol=1e-6)


def test_shards_and_stacks() -> None:
    (plain, values), (other, more) = matrix(), matrix(1)
    weight = fuse_weights([read(plain), read(other)])
    dense = F.pad(torch.cat((values, more)), (0, 1, 0, 1))
    assert isinstance(weight, Int4Weight) and weight.order == "gptq"
    rows = torch.cat((torch.arange(40, 64), torch.full((8,), -1)))
    columns = torch.cat((torch.arange(32, 64), torch.full((32,), -1)))
    for part, want in (
        (weight.outputs(rows), dense[rows][:, :-1]),
        (weight.inputs(columns, 32), dense[:-1][:, columns]),
    ):
        assert isinstance(part, Int4Weight)
        torch.testing.assert_close(part.dequantize(torch.float32), want, rtol=1e-6, atol=1e-6)
        assert torch.equal(part.in_order().dequantize(torch.float32), part.dequantize(torch.float32))


def test_shards_and_stacks_in_activation_order() -> None:
    (tensors, values), (other, more) = matrix(ordered=False), matrix(1, ordered=False)
    weight = read(tensors)
    columns = torch.arange(32, 96)
    cut = weight.inputs(columns, 32)
    assert isinstance(cut, DenseWeight)
    torch.testing.assert_close(cut.weight, values[:, columns], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        weight.outputs(torch.arange(8)).dequantize(torch.float32), values[:8], rtol=1e-6, atol=1e-6
    )
    same, several = fuse_weights([weight, weight]), fuse_weights([weight, read(other)])
    assert isinstance(same, Int4Weight) and isinstance(several, DenseWeight)
    torch.testing.assert_close(same.dequantize(torch.float32), torch.cat((values, values)), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(several.weight, torch.cat((values, more)), rtol=1e-6, atol=1e-6)


@NATIVE
@pytest.mark.parametrize("ordered", [True, False])
def test_products(ordered: bool) -> None:
    """Of the native operators, also after a norm, and of torch's int4 product."""
    tensors, values = matrix(ordered=ordered)
    weight, x = read(tensors), torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(0))
    packed, out = pack(weight, torch.float32, "cpu"), torch.empty(3, ROWS)
    _C.linear(packed.native, x, None, 0.0, None, out, "none", 1.0, 0.0)
    torch.testing.assert_close(out, x @ values.T, rtol=1e-4, atol=1e-4)
    gain = torch.rand(COLUMNS)
    _C.linear(packed.native, x, gain, 1e-5, None, out, "none", 1.0, 0.0)
    torch.testing.assert_close(out, F.rms_norm(x, (COLUMNS,), gain, 1e-5) @ values.T, rtol=1e-4, atol=1e-4)
    low = unfused.pack(weight, torch.bfloat16, "cpu")(x.bfloat16())
    torch.testing.assert_close(low.float(), x @ values.T, rtol=0.05, atol=0.2)


def test_zero_points_wrap_around() -> None:
    stored = torch.arange(16, dtype=torch.uint8).view(2, 8)
    weight = from_gptq(torch.zeros(4, 8, dtype=torch.int32), pack_int4(stored), torch.ones(2, 8), 16)
    assert np.array_equal(unpack_int4(weight.zeros).numpy(), (stored.numpy() + 1) % 16)


def test_groups_of_unequal_size_are_refused() -> None:
    tensors, _ = matrix()
    tensors["m.g_idx"][0] = 1
    with pytest.raises(UserError, match=r"m\.g_idx does not divide the inputs into groups of equal size"):
        read(tensors)
