"""The CUDA projections against float64, run against run, row by row, and over virtual ranks of a group."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.model.linear import DenseWeight, Int4Weight, pack_int4
from swiftspec.ops import cuda_linear as ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _C.cuda_built, reason=_C.build_info),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
ROOT = Path(__file__).resolve().parents[2]
DEVICE = torch.device("cuda", 0)
TOLERANCE = 2e-3
EPS = 1e-5
EPOCHS = int(os.environ.get("SWIFTSPEC_TEST_EPOCHS", "60"))  # fewer under a sanitizer (tools/gpu_check.py)
# K, N: every cut and chunk of x; small, odd, and of Llama-3 shards
SHAPES = [(64, 32), (128, 8), (512, 72), (2048, 3072), (3072, 1280), (1024, 4096), (8192, 2560), (14336, 1024)]


@dataclass
class Norm:
    weight: Tensor
    eps: float = EPS


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weight(k: int, n: int, group: int, seed: int = 0, bias: bool = False) -> DenseWeight | Int4Weight:
    dice = generator(seed)
    shift = torch.randn(n, generator=dice) if bias else None
    if group == 0:
        return DenseWeight(torch.randn(n, k, generator=dice).mul_(k**-0.5).bfloat16(), shift)
    codes = torch.randint(16, (k, n), generator=dice, dtype=torch.uint8)
    zeros = torch.randint(16, (k // group, n), generator=dice, dtype=torch.uint8)
    scales = torch.rand(k // group, n, generator=dice).add_(0.5).mul_(k**-0.5 / 5).half()
    return Int4Weight(pack_int4(codes), scales, pack_int4(zeros), group, shift)


def rows_of(count: int, k: int, seed: int = 1) -> Tensor:
    return torch.randn(count, k, generator=generator(seed)).bfloat16().to(DEVICE)


def exact(x: Tensor, of: DenseWeight | Int4Weight) -> Tensor:
    product = x.double() @ of.dequantize(torch.float64).to(DEVICE).T
    return product if of.bias is None else product + of.bias.double().to(DEVICE)


def normalised(x: Tensor, norm: Norm) -> Tensor:
    """As the model defines it: rounded to bfloat16 before the weight and after it."""
    scale = (x.double().square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    return ((x.double() * scale).bfloat16().double() * norm.weight.double()).bfloat16()


def error(got: Tensor, want: Tensor) -> float:
    assert got.isfinite().all()
    return ((got.double() - want).norm() / want.norm()).item()


def norm_of(k: int) -> Norm:
    return Norm(torch.rand(k, generator=generator(2)).add_(0.5).bfloat16().to(DEVICE))


@pytest.mark.parametrize("group", [128, 64, 32, 0])
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_products(k: int, n: int, group: int) -> None:
    if group and k % group:
        pytest.skip("the groups do not divide the inputs")
    w, x, norm = weight(k, n, group, bias=True), rows_of(40, k), norm_of(k)
    packed = ops.pack(w, torch.bfloat16, DEVICE)
    for count in (1, 3, 8, 9, 16, 17, 32, 40):
        few = x[:count]
        residual = rows_of(count, n, 3)
        want = exact(few, w)
        assert error(ops.linear_residual(few, packed, residual), want + residual.double()) <= TOLERANCE
        want = exact(normalised(few, norm), w)
        assert error(ops.norm_linear(few, norm, packed), want) <= TOLERANCE
        logits = ops.norm_head(few, norm, packed)
        assert logits.dtype == torch.float32 and error(logits, want) <= TOLERANCE / 2
        gate, up = want.bfloat16().double().chunk(2, -1)
        gated = torch.nn.functional.silu(gate).bfloat16().double() * up
        # a gate that rounds the other way moves the product by a unit of bfloat16
        assert error(ops.norm_swiglu(few, norm, packed), gated) <= 2 * TOLERANCE


@pytest.mark.parametrize("outputs", [1, 7, 33, 128257])
def test_odd_numbers_of_outputs(outputs: int) -> None:
    w, x, norm = weight(256, outputs, 0), rows_of(5, 256), norm_of(256)
    packed = ops.pack(w, torch.bfloat16, DEVICE)
    want = exact(normalised(x, norm), w)
    assert error(ops.norm_head(x, norm, packed), want) <= TOLERANCE / 2
    assert error(ops.norm_linear(x, norm, packed), want) <= TOLERANCE


def test_other_groups_are_cut_or_dequantised() -> None:
    x = rows_of(4, 768)
    for group in (256, 96, 48):
        w = weight(768, 64, group)
        packed = ops.pack(w, torch.bfloat16, DEVICE)
        zero = torch.zeros(4, 64, dtype=torch.bfloat16, device=DEVICE)
        assert error(ops.linear_residual(x, packed, zero), exact(x, w)) <= TOLERANCE * (1 if group != 48 else 2)


@pytest.mark.parametrize("group", [128, 0])
def test_bitwise_run_to_run(group: int) -> None:
    packed, norm = ops.pack(weight(4096, 6144, group), torch.bfloat16, DEVICE), norm_of(4096)
    for count in (8, 32):
        x = rows_of(count, 4096)
        first = ops.norm_linear(x, norm, packed)
        for _ in range(50):
            assert torch.equal(ops.norm_linear(x, norm, packed), first)


@pytest.mark.parametrize("group", [128, 32, 0])
@pytest.mark.parametrize(("k", "n"), [(2048, 768), (8192, 1024), (14336, 256)])
def test_rows_do_not_depend_on_each_other(k: int, n: int, group: int) -> None:
    """To the bit: a row alone, among any number of others, and with the others changed."""
    packed, norm = ops.pack(weight(k, n, group), torch.bfloat16, DEVICE), norm_of(k)
    x = rows_of(33, k)
    alone = torch.cat([ops.norm_head(row[None], norm, packed) for row in x])
    for count in range(1, 34):
        assert torch.equal(ops.norm_head(x[:count], norm, packed), alone[:count])
    other = rows_of(32, k, 9)
    for row in (0, 7, 8, 31):
        other[row] = x[row]
        assert torch.equal(ops.norm_head(other, norm, packed)[row], alone[row])


def test_replayed_as_a_graph() -> None:
    """Four projections in a row, one on the other's result, with programmatic launch between them."""
    layers = [ops.pack(weight(1024, 1024, 128, seed), torch.bfloat16, DEVICE) for seed in range(4)]
    x, zero = rows_of(8, 1024), torch.zeros(8, 1024, dtype=torch.bfloat16, device=DEVICE)

    def step() -> Tensor:
        y = x
        for layer in layers:
            y = ops.linear_residual(y, layer, zero)
        return y

    want = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for _ in range(20):
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, want)


class Ranks:
    """Virtual ranks of a group on this GPU: inboxes in its memory, one launch for all."""

    def __init__(self, size: int, k: int, n: int, group: int, patience: float = 5.0) -> None:
        self.weights = [weight(k, n, group, seed) for seed in range(size)]
        self.packed = [ops.pack(w, torch.bfloat16, DEVICE) for w in self.weights]
        lines = ops.lines_of(n)
        self.inboxes = [ops.inbox(size, lines, DEVICE) for _ in range(size)]
        self.trouble = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        addresses = [box.data_ptr() for box in self.inboxes]
        self.ends = [ops.Communicator(r, addresses, lines, self.trouble, DEVICE, patience) for r in range(size)]

    def sum(self, x: list[Tensor], residual: Tensor, delays: int) -> list[Tensor]:
        out = [torch.full_like(residual, float("nan")) for _ in x]
        _C.linear_cuda_virtual(
            [p.native for p in self.packed], [rows.data_ptr() for rows in x], residual.data_ptr(),
            [rows.data_ptr() for rows in out], [end.native for end in self.ends], len(residual), delays,
            torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        return out

    def expected(self, x: list[Tensor], residual: Tensor) -> Tensor:
        """Each rank's product rounded, added in rank order in float32, rounded, then the residual."""
        zero = torch.zeros_like(residual)
        total = torch.zeros_like(residual, dtype=torch.float32)
        for rows, packed in zip(x, self.packed):
            total += ops.linear_residual(rows, packed, zero).float()
        return (total.bfloat16().float() + residual.float()).bfloat16()


@pytest.mark.parametrize("group", [128, 0])
@pytest.mark.parametrize("size", [1, 2, 4, 6, 8])
def test_sums_over_virtual_ranks(size: int, group: int) -> None:
    """Bit for bit the rounded products in rank order, the same on every rank, over epochs of changing length, with and
    without pauses."""
    ranks = Ranks(size, 512, 1024, group)
    for epoch in range(EPOCHS):
        count = (8, 1, 32, 3, 17, 16)[epoch % 6]
        x = [rows_of(count, 512, 100 * epoch + r) for r in range(size)]
        residual = rows_of(count, 1024, epoch)
        want = ranks.expected(x, residual)
        for out in ranks.sum(x, residual, delays=epoch % 3 * (epoch + 1)):
            assert torch.equal(out, want), f"epoch {epoch}"
    assert [int(end.epoch) for end in ranks.ends] == [EPOCHS] * size
    assert ranks.ends[0].trouble() is None


def test_flags_that_return_on_virtual_ranks() -> None:
    """Across the end of 32 bits, where flags start again and lines are cleaned."""
    ranks = Ranks(4, 512, 1024, 128)
    for start in (2**30 - 3, 2**32 - 8):
        for end in ranks.ends:
            end.epoch.fill_(start)
        for epoch in range(16):
            count = (32, 1)[epoch % 2]
            x = [rows_of(count, 512, epoch + r) for r in range(4)]
            residual = rows_of(count, 1024, epoch)
            for out in ranks.sum(x, residual, delays=epoch):
                assert torch.equal(out, ranks.expected(x, residual))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_gathers_over_virtual_ranks(size: int) -> None:
    """Messages of any number of words, between sums that share their lines and epochs, across flags that return."""
    ranks = Ranks(size, 512, 1024, 128)
    for start in (0, 2**32 - 8):
        for end in ranks.ends:
            end.epoch.fill_(start)
        for count in (1, 2, 7, 600, 16384, 136):
            mine = [
                torch.randint(2**31, (count,), generator=generator(r), dtype=torch.int32).cuda() for r in range(size)
            ]
            out = [torch.full((size, count + 1), -1, dtype=torch.int32, device=DEVICE) for _ in mine]
            _C.gather_cuda_virtual(
                [end.native for end in ranks.ends], [m.data_ptr() for m in mine], [o.data_ptr() for o in out], count,
                torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip
            for found in out:
                assert torch.equal(found.flatten()[: size * count].view(size, count), torch.stack(mine))
                assert (found.flatten()[size * count :] == -1).all(), "nothing is written behind the messages"
            x, residual = [rows_of(3, 512, r) for r in range(size)], rows_of(3, 1024, 7)
            for summed in ranks.sum(x, residual, 0):
                assert torch.equal(summed, ranks.expected(x, residual))


def test_what_is_asked_for_ahead_changes_nothing() -> None:
    """A projection that names the next one's tiles, more of them than are asked for and fewer than its warps."""
    first, norm = ops.pack(weight(2048, 3072, 128), torch.bfloat16, DEVICE), norm_of(2048)
    x, zero = rows_of(8, 2048), torch.zeros(8, 8192, dtype=torch.bfloat16, device=DEVICE)
    for k, n, group in ((8192, 8192, 128), (64, 8192, 0), (128, 8, 128)):
        then = ops.pack(weight(k, n, group), torch.bfloat16, DEVICE)
        rows = rows_of(8, k)
        want = ops.norm_linear(x, norm, first), ops.linear_residual(rows, then, zero[:, :n].contiguous())
        first.native.precede(then.tiles.data_ptr(), then.tiles.nbytes)
        got = ops.norm_linear(x, norm, first), ops.linear_residual(rows, then, zero[:, :n].contiguous())
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_a_group_of_one_through_the_plain_entry() -> None:
    ranks = Ranks(1, 512, 1024, 128)
    x, residual = rows_of(40, 512), rows_of(40, 1024, 5)
    got = ops.linear_residual(x, ranks.packed[0], residual, ranks.ends[0])
    assert torch.equal(got, ranks.expected([x], residual))
    assert int(ranks.ends[0].epoch) == 2  # 32 rows, then 8
    message = torch.randn(8, 17, dtype=torch.float64, device=DEVICE)
    assert ranks.ends[0].takes(message) and torch.equal(ranks.ends[0].gather(message), message[None])
    assert int(ranks.ends[0].epoch) == 3


ALONE = """
from tests.gpu.test_linear import Ranks, ops, rows_of, torch
ranks = Ranks(2, 512, 1024, 128, patience=0.2)
try:
    ops.linear_residual(rows_of(3, 512), ranks.packed[0], rows_of(3, 1024), ranks.ends[0])
    torch.cuda.synchronize()
except RuntimeError:
    print(ranks.ends[0].trouble())
"""


def test_a_peer_that_never_arrives() -> None:
    """In a process of its own: the kernel ends itself, and with it the context."""
    run = subprocess.run(
        [sys.executable, "-c", ALONE], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.stdout == "GPU rank 0 waited too long for rank 1 (slot 0, epoch 0)\n", run.stderr[-2000:]


def test_bad_input() -> None:
    packed, x = ops.pack(weight(256, 64, 0), torch.bfloat16, DEVICE), rows_of(4, 256)
    residual = torch.zeros(4, 64, dtype=torch.bfloat16, device=DEVICE)
    wide = torch.zeros(4, 264, dtype=torch.bfloat16, device=DEVICE)
    for bad in (x.float(), x.cpu(), x[:, :128], wide[:, 8:], wide.flatten()[1 : 1 + 4 * 256].view(4, 256)):
        with pytest.raises(ValueError) as refused:
            ops.linear_residual(bad, packed, residual)
        assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="residual"):
        ops.linear_residual(x, packed, residual[:3])
