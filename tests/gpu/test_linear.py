"""CUDA projections: accuracy against float64, reproducibility, and independence of rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cuda import large_m
from swiftspec.backends.cuda import linear as ops
from swiftspec.backends.cuda.norm import CudaNorm
from swiftspec.backends.cuda.sampling import children
from swiftspec.model.formats.int4 import Int4Weight, pack_int4
from swiftspec.model.packed_model import PackedMlp
from swiftspec.model.weights import DenseWeight
from tests.gpu.device import DEVICE, EMULATED, FEW, captured, emulated_gpu, most, needs_kernels

pytestmark = [pytest.mark.gpu, needs_kernels]
TOLERANCE = 2e-3
EPS = 1e-5
# K, N: every cut and chunk of x; small, odd, and of Llama-3 shards
LARGE = [(2048, 3072), (3072, 1280), (1024, 4096), (8192, 2560), (14336, 1024)]
SHAPES = [(64, 32), (128, 8), (512, 72), (24576, 8), *most(LARGE, 0)]


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


def exact(of: DenseWeight | Int4Weight) -> Callable[[Tensor], Tensor]:
    """The product in float64."""
    there = of.to(DEVICE) if isinstance(of, Int4Weight) else of  # a CPU takes seconds for a large matrix
    matrix = there.dequantize(torch.float64).to(DEVICE).T
    bias = 0 if of.bias is None else of.bias.double().to(DEVICE)
    return lambda x: x.double() @ matrix + bias


def normalised(x: Tensor, norm: CudaNorm) -> Tensor:
    """RMSNorm as the model defines it: rounded to bfloat16 before and after the weight is applied."""
    scale = (x.double().square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    return ((x.double() * scale).bfloat16().double() * norm.weight.double()).bfloat16()


def error(got: Tensor, want: Tensor) -> float:
    assert got.isfinite().all()
    return ((got.double() - want).norm() / want.norm()).item()


def check(got: Tensor, want: Tensor, rounded: Tensor) -> None:
    """Nearly as close to `want` as `rounded`, which is `want` after bfloat16's roundings alone: a few outputs may have
    unlucky roundings."""
    assert error(got, want) <= max(TOLERANCE, 1.25 * error(rounded, want))


def norm_of(k: int) -> CudaNorm:
    return CudaNorm(torch.rand(k, generator=generator(2)).add_(0.5).bfloat16().to(DEVICE), EPS)


@pytest.mark.parametrize("group", [128, 64, 32, 0])
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_products(k: int, n: int, group: int) -> None:
    if group and k % group:
        pytest.skip("the groups do not divide the inputs")
    if FEW and k > 8192 and group in (64, 32):
        pytest.skip("long")
    w, x, norm = weight(k, n, group, bias=True), rows_of(40, k), norm_of(k)
    packed, product = ops.pack(w, torch.bfloat16, DEVICE), exact(w)
    for count in (3, 9, 40) if FEW else (1, 3, 8, 9, 16, 17, 32, 40):  # 40: 32 and 8
        few = x[:count]
        residual = rows_of(count, n, 3)
        want = product(few)
        rounded = (want.bfloat16().double() + residual.double()).bfloat16()
        check(ops.linear_residual(few, packed, residual), want + residual.double(), rounded)
        want = product(normalised(few, norm))
        check(ops.norm_linear(few, norm, packed), want, want.bfloat16())
        logits = ops.norm_head(few, norm, packed)
        assert logits.dtype == torch.float32 and error(logits, want) <= TOLERANCE / 2
        gate, up = want.bfloat16().double().chunk(2, -1)
        gated = torch.nn.functional.silu(gate).bfloat16().double() * up
        # a gate that rounds the other way moves the product by a unit of bfloat16
        assert error(ops.norm_swiglu(few, norm, packed), gated) <= 2 * TOLERANCE


@pytest.mark.parametrize("group", [128, 32, 0])
@pytest.mark.parametrize(("k", "n"), most([(256, 144), (8192, 28672), (14336, 4096)], 1))
def test_a_prompts_chunk(k: int, n: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than the kernels support without wgmma: a library GEMM over weights that are unpacked part by part."""
    w, x, norm = weight(k, n, group, bias=True), rows_of(large_m.MAX_KERNEL_ROWS + 44, k), norm_of(k)
    packed, residual = ops.pack(w, torch.bfloat16, DEVICE), rows_of(large_m.MAX_KERNEL_ROWS + 44, n, 3)
    monkeypatch.setattr(large_m, "SCRATCH_BYTES", 2 * 32 * k * 2)  # two strips at a time
    want = exact(w)(x)
    rounded = (want.bfloat16().double() + residual.double()).bfloat16()
    check(ops.linear_residual(x, packed, residual), want + residual.double(), rounded)
    doubled = ops.linear_residual(x, packed, residual, lambda product: product * 2)
    assert error(doubled, 2 * want + residual.double()) <= 2 * TOLERANCE
    want = exact(w)(normalised(x, norm))
    assert error(ops.norm_linear(x, norm, packed), want) <= 2 * TOLERANCE  # int4 weights are rounded once more
    gate, up = want.bfloat16().double().chunk(2, -1)
    gated = torch.nn.functional.silu(gate).bfloat16().double() * up
    assert error(ops.norm_swiglu(x, norm, packed), gated) <= 3 * TOLERANCE


# K, N, rows: a CTA and a cluster per 128 outputs, padded strips and inputs, more tiles than run concurrently
CHUNKS = [(256, 144, 33), (1024, 72, 128), (4096, 304, 200), (512, 2600, 300), (1000, 73, 130), (2048, 640, 1000),
          (28672, 8192, 1000)]  # fmt: skip


@pytest.mark.parametrize("group", [128, 64, 32, 0])
@pytest.mark.parametrize(("k", "n", "rows"), most(CHUNKS, 6, 3))
def test_chunks_with_wgmma(k: int, n: int, rows: int, group: int) -> None:
    """Every epilogue of the kernel for prefill chunks; the results are those of a library up to the order of sums."""
    if group and (k % group or n % 8):
        pytest.skip("the groups do not divide the inputs, or the outputs are no words of codes")
    w, x, norm = weight(k, n, group, bias=True), rows_of(rows, k), norm_of(k)
    packed, residual = ops.pack(w, torch.bfloat16, DEVICE), rows_of(rows, n, 3)
    if not packed.native.has_prefill_kernel:
        pytest.skip("no wgmma")
    product, tolerance = exact(w), (2 if group else 1) * TOLERANCE  # int4 weights are rounded once more
    with large_m.prefill_chunk():
        got, want = ops.linear_residual(x, packed, residual), product(x)
        assert error(got, want + residual.double()) <= 2 * TOLERANCE
        assert torch.equal(ops.linear_residual(x, packed, residual), got)
        want = product(normalised(x, norm))
        assert error(ops.norm_linear(x, norm, packed), want) <= 2 * TOLERANCE
        assert error(ops.norm_head(x, norm, packed), want) <= tolerance / 2
        if n % 2 == 0:
            gate, up = want.bfloat16().double().chunk(2, -1)
            gated = torch.nn.functional.silu(gate).bfloat16().double() * up
            assert error(ops.norm_swiglu(x, norm, packed), gated) <= 3 * TOLERANCE


def test_the_mlp_launches_its_two_projections() -> None:
    norm, x, residual = norm_of(256), rows_of(9, 256), rows_of(9, 256, 3)
    gate_up, down = (ops.pack(weight(k, n, 128), torch.bfloat16, DEVICE) for k, n in ((256, 512), (256, 256)))
    mlp = PackedMlp(gate_up, down)
    want = ops.linear_residual(ops.norm_swiglu(x, norm, mlp.gate_up), mlp.down, residual)
    assert torch.equal(ops.mlp(x, norm, mlp, residual), want)


def test_candidates_right_after_the_head() -> None:
    """The sampling kernel starts before the LM head, whose logits it reads, has ended."""
    packed = ops.pack(weight(256, 136, 128), torch.bfloat16, DEVICE)
    inputs, norm = [rows_of(8, 256, seed) for seed in range(4)], norm_of(256)
    found = [children(ops.norm_head(x, norm, packed), 136, 8) for x in inputs]
    for x, best in zip(inputs, found, strict=True):
        logits = ops.norm_head(x, norm, packed)
        torch.cuda.synchronize()
        assert all(torch.equal(got, want) for got, want in zip(best, children(logits, 136, 8), strict=True))


AMPERE = EMULATED and _C.cuda_device()["arch"] < 90
# bytes of shared memory; with the smaller one (RTX 3090) int4 uses launches of 32 rows
A100, SMALL = 166912, 101376
WIDE = [(1024, 304), (1000, 72), (8192, 1280), (14336, 1024), (4096, 28672)]


@pytest.mark.parametrize("group", [128, 32, 0])
@pytest.mark.parametrize(("k", "n"), most(WIDE, 2, 1))
@pytest.mark.parametrize("shared", [A100, SMALL] if AMPERE else [0])
def test_many_rows_read_a_weight_once(shared: int, k: int, n: int, group: int) -> None:
    """Results are bitwise identical to those in batches of eight; one launch, several, and with remaining rows."""
    if (group and k % group) or (group and shared == SMALL):
        pytest.skip("the groups do not divide the inputs, or 32 rows of int4 are all of a launch")
    with emulated_gpu(16, 16, 16, 16, shared=shared) if shared else nullcontext():
        packed, norm = ops.pack(weight(k, n, group, bias=True), torch.bfloat16, DEVICE), norm_of(k)
        few = 33 if group == 128 else 97 if group or AMPERE else 168
        counts = (few,) if FEW else (33, 64, 70, 97, 130, 168)
        assert not EMULATED or all(packed.native.scratch_bytes(count, False) > 0 for count in counts)
        x, residual = rows_of(max(counts), k), rows_of(max(counts), n, 3)
        products: tuple[Callable[[slice], Tensor], ...] = (
            lambda here: ops.norm_head(x[here], norm, packed),
            lambda here: ops.norm_swiglu(x[here], norm, packed),
            lambda here: ops.linear_residual(x[here], packed, residual[here]),
        )
        for product in products[: 1 if FEW and group != 128 else 3]:
            eights = torch.cat([product(slice(i, i + 8)) for i in range(0, max(counts), 8)])
            assert all(torch.equal(product(slice(count)), eights[:count]) for count in counts)


@pytest.mark.parametrize("group", [128, 64])
def test_rows_have_the_same_bits_with_every_tiling_of_a_split(group: int) -> None:
    """Also alone, and in launches of more rows than a variant has. A row that the GPU does not have is the default."""
    k, n, count = (1024, 72, 40) if EMULATED else (4096, 6144, 70)
    packed, norm = ops.pack(weight(k, n, group, bias=True), torch.bfloat16, DEVICE), norm_of(k)
    x, residual = rows_of(count, k), rows_of(count, n, 3)
    tilings = ops.tilings_of(packed, 2 if FEW else 40)
    variants = {"ring", "direct"} | ({"stream"} if _C.cuda_device()["shared"] > 128 << 10 else set())  # else no room
    assert {tiling.variant for tiling in tilings} == variants and tilings[0] == packed.native.row
    splits: dict[tuple[int, int], list[Tensor]] = {}
    for tiling in tilings:
        tuned = ops.with_tiling(packed, tiling)
        assert ops.mask_outputs(tuned, [0], DEVICE).native.row == tiling
        few = [ops.norm_head(x[:3], norm, tuned), ops.linear_residual(x[:3], tuned, residual[:3])]
        many = [ops.norm_head(x, norm, tuned)[:3], ops.linear_residual(x, tuned, residual)[:3]]
        want = splits.setdefault((tiling.cluster, tiling.warps), few)
        assert all(torch.equal(a, b) for a, b in zip([*few, *many], [*want, *want], strict=True)), tiling
    unknown = ops.ProjectionTiling("other", 1, 8, 1, 1)
    assert ops.with_tiling(packed, unknown).native.row == tilings[0]


@pytest.mark.skipif(not EMULATED, reason="a GPU has the size that it has; the large shapes above go round")
def test_many_iterations_of_few_clusters() -> None:
    """More strips than run concurrently, so that a CTA iterates, and more tiles than fit into shared memory."""
    with emulated_gpu(8):
        for group in (128, 0):
            w = weight(2048, 304, group)
            packed = ops.pack(w, torch.bfloat16, DEVICE)
            for rows in (8, 20, 40):
                x, zero = rows_of(rows, 2048), torch.zeros(rows, 304, dtype=torch.bfloat16)
                want = exact(w)(x)
                check(ops.linear_residual(x, packed, zero), want, want.bfloat16())


def test_a_projection_on_a_part_of_the_multiprocessors() -> None:
    """Few blocks compute all strips. Another tiling and another bias keep to the part."""
    all_of_them = _C.cuda_device()["at_once"][0]
    few = max(1, all_of_them // 8)
    w = weight(1024, 328, 128)
    packed = ops.pack(w, torch.bfloat16, DEVICE, multiprocessors=few)
    assert packed.native.multiprocessors == few and ops.pack(w, torch.bfloat16, DEVICE).native.multiprocessors > few
    assert ops.mask_outputs(packed, [0], DEVICE).native.multiprocessors == few
    tuned = {packed.shape_name: ops.ProjectionTiling("direct", 1, 4, 1, 1)}
    assert ops.pack(w, torch.bfloat16, DEVICE, tuned).native.row[0] == "direct"
    assert ops.pack(w, torch.bfloat16, DEVICE, tuned, few).native.row == packed.native.row, "timed on the whole GPU"
    want = exact(w)
    for tiling in {ops.ProjectionTiling(*packed.native.row), *ops.tilings_of(packed, 2)}:
        tuned = ops.with_tiling(packed, tiling)
        assert tuned.native.multiprocessors == few
        for rows in (8, 40):
            x, zero = rows_of(rows, 1024), torch.zeros(rows, 328, dtype=torch.bfloat16, device=DEVICE)
            check(ops.linear_residual(x, tuned, zero), want(x), want(x).bfloat16())
    for number in (0, all_of_them + 1):
        with pytest.raises(ValueError, match="multiprocessors"):
            ops.pack(w, torch.bfloat16, DEVICE, multiprocessors=number)


# 132 multiprocessors in parts as dies have them, and how many clusters of 4 and of 8 run at a time
DIES = [((18,) * 4 + (16, 16, 14, 14), 30, 14), ((16,) * 6 + (18, 18), 32, 16),
        ((18,) * 3 + (16,) * 4 + (14,), 31, 15), ((16,) * 7 + (20,), 33, 16)]  # fmt: skip


@pytest.mark.skipif(not EMULATED, reason="a GPU has the clusters that it has")
@pytest.mark.parametrize(("parts", "fours", "eights"), most(DIES, 4, 2))
def test_clusters_are_counted_on_the_device(parts: tuple[int, ...], fours: int, eights: int) -> None:
    """And the tiling depends on the count: 16 clusters of 8 are one wave only if 16 of them run concurrently."""
    with emulated_gpu(*parts):
        found = _C.cuda_device()
        assert found["at_once"] == ([132, 66, fours, eights] if found["arch"] >= 90 else [132, 0, 0, 0])
        w = weight(4096, 512, 128)
        packed, x, zero = ops.pack(w, torch.bfloat16, DEVICE), rows_of(8, 4096), torch.zeros(8, 512).bfloat16()
        want = exact(w)(x)
        check(ops.linear_residual(x, packed, zero), want, want.bfloat16())


@pytest.mark.skipif(not EMULATED, reason="a GPU has the driver that it has")
def test_an_old_driver_gets_no_early_launches() -> None:
    """Before CUDA 12.4 a driver cannot capture them; the emulated one refuses them."""
    with emulated_gpu(16, 16, driver=12030):
        w, x, norm = weight(128, 64, 128), rows_of(3, 128), norm_of(128)
        packed, want = ops.pack(w, torch.bfloat16, DEVICE), exact(w)(normalised(x, norm))
        check(ops.norm_linear(x, norm, packed), want, want.bfloat16())


def test_sizes_of_tiles() -> None:
    """4.25 bits per weight in groups of 128; 16 in bf16."""
    assert _C.cuda_tile_bytes(4096, 4096, 128) == 4096 * 4096 * 17 // 32
    assert _C.cuda_tile_bytes(4096, 4096, 0) == 4096 * 4096 * 2


@pytest.mark.parametrize("outputs", most([1, 7, 33, 128257], 3))
def test_odd_numbers_of_outputs(outputs: int) -> None:
    w, x, norm = weight(256, outputs, 0), rows_of(5, 256), norm_of(256)
    packed = ops.pack(w, torch.bfloat16, DEVICE)
    want = exact(w)(normalised(x, norm))
    assert error(ops.norm_head(x, norm, packed), want) <= TOLERANCE / 2
    check(ops.norm_linear(x, norm, packed), want, want.bfloat16())


def test_other_groups_are_split_or_dequantised() -> None:
    x = rows_of(4, 768)
    for group in (256, 96, 48):
        w = weight(768, 64, group)
        packed = ops.pack(w, torch.bfloat16, DEVICE)
        zero = torch.zeros(4, 64, dtype=torch.bfloat16, device=DEVICE)
        assert error(ops.linear_residual(x, packed, zero), exact(w)(x)) <= TOLERANCE * (1 if group != 48 else 2)


@pytest.mark.parametrize("group", [128, 0])
def test_bitwise_run_to_run(group: int) -> None:
    k, n, times = (512, 96, 2 if FEW else 5) if EMULATED else (4096, 6144, 50)
    packed, norm = ops.pack(weight(k, n, group), torch.bfloat16, DEVICE), norm_of(k)
    for count in (8, 32):
        x = rows_of(count, k)
        first = ops.norm_linear(x, norm, packed)
        for _ in range(times):
            assert torch.equal(ops.norm_linear(x, norm, packed), first)


@pytest.mark.parametrize("group", [128, 32, 0])
@pytest.mark.parametrize(("k", "n"), [(512, 40)] if EMULATED else [(2048, 768), (8192, 1024), (14336, 256)])
def test_rows_do_not_depend_on_each_other(k: int, n: int, group: int) -> None:
    """Bitwise: a row alone, among any number of other rows, and with the other rows changed."""
    packed, norm = ops.pack(weight(k, n, group), torch.bfloat16, DEVICE), norm_of(k)
    x = rows_of(33, k)
    alone = torch.cat([ops.norm_head(row[None], norm, packed) for row in x])
    for count in (1, 7, 8, 9, 16, 17, 24, 25, 32, 33) if FEW else range(1, 34):
        assert torch.equal(ops.norm_head(x[:count], norm, packed), alone[:count])
    other = rows_of(32, k, 9)
    for row in (0, 7, 8, 31):
        other[row] = x[row]
        assert torch.equal(ops.norm_head(other, norm, packed)[row], alone[row])


def test_replayed_as_a_graph() -> None:
    """A chain of four projections with programmatic dependent launch."""
    size = 128 if EMULATED else 1024
    layers = [ops.pack(weight(size, size, 128, seed), torch.bfloat16, DEVICE) for seed in range(4)]
    x, zero = rows_of(8, size), torch.zeros(8, size, dtype=torch.bfloat16, device=DEVICE)

    def step() -> Tensor:
        y = x
        for layer in layers:
            y = ops.linear_residual(y, layer, zero)
        return y

    want = step()
    replay = captured(step)
    for _ in range(5 if FEW else 20):
        got = replay()
        assert torch.equal(got, want)
        got.fill_(float("nan"))


def test_prefetching_changes_no_result() -> None:
    """A projection that prefetches the next one's tiles: more than the limit, and fewer than it has warps."""
    k, n = (128, 96) if EMULATED else (2048, 3072)
    first, norm = ops.pack(weight(k, n, 128), torch.bfloat16, DEVICE), norm_of(k)
    x, zero = rows_of(8, k), torch.zeros(8, 8192, dtype=torch.bfloat16, device=DEVICE)
    for k, n, group in (
        [(64, 1024, 0), (128, 8, 128)] if EMULATED else [(8192, 8192, 128), (64, 8192, 0), (128, 8, 128)]
    ):
        then = ops.pack(weight(k, n, group), torch.bfloat16, DEVICE)
        rows = rows_of(8, k)
        want = ops.norm_linear(x, norm, first), ops.linear_residual(rows, then, zero[:, :n].contiguous())
        first.native.precede(then.tiles)
        got = ops.norm_linear(x, norm, first), ops.linear_residual(rows, then, zero[:, :n].contiguous())
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_invalid_arguments_are_rejected() -> None:
    packed, x = ops.pack(weight(256, 64, 0), torch.bfloat16, DEVICE), rows_of(4, 256)
    residual = torch.zeros(4, 64, dtype=torch.bfloat16, device=DEVICE)
    wide = torch.zeros(4, 264, dtype=torch.bfloat16, device=DEVICE)
    for bad in (x.float(), x.to("meta"), x[:, :128], wide[:, 8:], wide.flatten()[1 : 1 + 4 * 256].view(4, 256)):
        with pytest.raises(ValueError) as refused:
            ops.linear_residual(bad, packed, residual)
        assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="residual"):
        ops.linear_residual(x, packed, residual[:3])
