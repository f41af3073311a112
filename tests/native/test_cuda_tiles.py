"""The arithmetic of csrc/cuda/linear/tiles.h: the CUDA projections, run lane by lane on the CPU under sanitizers."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
import torch

from tests.native.test_ll import build
from tests.support.cases import fast_first

pytestmark = pytest.mark.slow  # each test starts processes

Array = np.ndarray
HOPPER, AMPERE, SMALL = 232448, 166912, 101376  # bytes of shared memory: 9.0 and 10.0, 8.0, the others
NO_ROOM = 2  # the exit status of the emulator if a tiling does not fit


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> str:
    flags = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    return build(tmp_path_factory.mktemp("tiles") / "tiles", ["tests/native/cuda_tiles.cpp"], *flags)


def bf16(x: Array) -> Array:
    """float32 to bfloat16 bits by truncation: the exact values do not matter."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def wide(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def packed(codes: Array) -> Array:
    """[R, C] of 0..15 -> uint32 [R, C / 8], nibble i of word c is column 8c + i."""
    nibbles = codes.reshape(codes.shape[0], -1, 8).astype(np.uint32) << np.arange(0, 32, 4, dtype=np.uint32)
    return np.bitwise_or.reduce(nibbles, 2)


class Case:
    """A random weight, its dequantised matrix in float64, and 32 rows of x."""

    def __init__(self, k: int, n: int, group: int, *, exact: bool = False, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.k, self.n, self.group = k, n, group
        self.x = bf16(rng.integers(-4, 5, (32, k)) if exact else rng.standard_normal((32, k)))
        if group == 0:
            matrix = bf16(rng.integers(-8, 9, (n, k)) if exact else rng.standard_normal((n, k)))
            self.weight, self.bytes = wide(matrix), matrix.tobytes()
            return
        codes, zeros = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (k // group, n))
        scales = 2.0 ** rng.integers(-2, 2, zeros.shape) if exact else rng.uniform(0.01, 0.02, zeros.shape)
        scales = scales.astype(np.float16).astype(np.float32)
        self.weight = ((codes - zeros.repeat(group, 0)) * scales.repeat(group, 0).astype(np.float64)).T
        self.bytes = packed(codes).tobytes() + scales.tobytes() + packed(zeros).tobytes()

    def run(
        self,
        emulator: str,
        rows: int,
        clusters: int = 3,
        n_log: int = -1,
        cluster_log: int = -1,
        mode: str = "logits",
        rest: bytes = b"",
        shared: int = HOPPER,
    ) -> Array:
        numbers = (shared, self.k, self.n, self.group, rows, clusters, n_log, cluster_log)
        fed = self.bytes + self.x[:rows].tobytes() + rest
        run = subprocess.run([emulator, *map(str, numbers), mode], input=fed, capture_output=True, check=False)
        if run.returncode == NO_ROOM:
            pytest.skip("the shared memory has no room for this cut")
        assert run.returncode == 0, run.stderr.decode()[-2000:]
        return np.frombuffer(run.stdout, np.float32 if mode == "logits" else np.uint16).reshape(rows, -1)

    def truth(self, rows: int) -> Array:
        return wide(self.x[:rows]) @ self.weight.T


@pytest.mark.parametrize("cluster_log", [0, 1, 2, 3])
@pytest.mark.parametrize("n_log", fast_first([1, 0, 2, 3], 1))
@pytest.mark.parametrize("shared", [HOPPER, SMALL])
def test_every_tiling_gives_the_product(emulator: str, shared: int, n_log: int, cluster_log: int) -> None:
    """With small integers, whose sums are exact in any order: bitwise. 640 inputs are 5 tiles, fewer than the warps of
    some tilings; 72 outputs are 2.25 strips, and the padding of the last one is not written."""
    for group in (128, 0):
        case = Case(640, 72, group, exact=True)
        got = case.run(emulator, 5, 2, n_log, cluster_log, shared=shared)
        assert np.array_equal(got, case.truth(5))


@pytest.mark.parametrize("group", [128, 64, 32, 0])
@pytest.mark.parametrize(
    ("n", "first", "half", "head_dim"),
    [(72, 0, 36, 0), (72, 1, 16, 0), (72, 2, 4, 0), (8, 0, 4, 0), (256, 3, 64, 0), (256, 2, 64, 64), (384, 4, 64, 128)],
)
def test_unpacking_tiles_restores_the_rows(
    emulator: str, n: int, first: int, half: int, head_dim: int, group: int
) -> None:
    """Unpacks some strips, the last partly padding: outputs of the first half, then of the second, bitwise. Those of
    whole heads are consecutive."""
    case = Case(1152 if group else 1160, n, group, seed=n)
    numbers = map(str, (HOPPER, case.k, n, group, first, half, head_dim))
    run = subprocess.run([emulator, *numbers], input=case.bytes, capture_output=True, check=True)
    rows = np.arange(16 * first, 16 * first + half)
    outputs = 32 * first + np.arange(2 * half) if head_dim else np.concatenate((rows, n // 2 + rows))
    want = nearest(case.weight[outputs].astype(np.float32))
    assert np.array_equal(wide(np.frombuffer(run.stdout, np.uint16)).reshape(2 * half, case.k), want)


@pytest.mark.parametrize("group", [128, 64, 32, 0])
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 32])
def test_rows_and_groups(emulator: str, rows: int, group: int) -> None:
    case = Case(256, 40, group, exact=True, seed=rows)
    assert np.array_equal(case.run(emulator, rows), case.truth(rows))


@pytest.mark.parametrize("shape", [(8, 2), (40, 7), (64, 33), (72, 1), (2056, 34)])
def test_odd_sizes(emulator: str, shape: tuple[int, int]) -> None:
    """Any number of outputs, and inputs that end inside a tile (multiples of 8)."""
    case = Case(*shape, 0, exact=True)
    assert np.array_equal(case.run(emulator, 3), case.truth(3))


def nearest(x: Array) -> Array:
    """float64 that is exact in float32, rounded to bfloat16."""
    return torch.from_numpy(x.astype(np.float32)).bfloat16().double().numpy()


@pytest.mark.parametrize("group", [128, 0])
@pytest.mark.parametrize("n", [72, 80])
@pytest.mark.parametrize("mode", ["plain", "sum", "swiglu"])
def test_epilogues(emulator: str, mode: str, n: int, group: int) -> None:
    """Bias, residual, LL lines and SwiGLU, with the roundings of backends/reference: bitwise, except SiLU."""
    case, rows = Case(256, n, group, exact=True), 11
    dice = np.random.default_rng(5)
    bias = dice.integers(-9, 9, n).astype(np.float32)
    residual = bf16(dice.integers(-300, 300, (rows, n)))
    got = case.run(emulator, rows, mode=mode, rest=bias.tobytes() + residual.tobytes())
    product = nearest(case.truth(rows) + bias)
    if mode != "swiglu":
        assert np.array_equal(wide(got), nearest(product + wide(residual)))
        return
    gate, up = product[:, : n // 2], product[:, n // 2 :]
    with np.errstate(over="ignore"):
        want = nearest(gate / (1 + np.exp(-gate))) * up
    assert np.allclose(wide(got), want, rtol=2**-6, atol=1e-30)


@pytest.mark.parametrize("group", [128, 32, 0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads_are_stored_in_order(emulator: str, head_dim: int, group: int) -> None:
    """Of a QKV projection, whose lanes have both elements of a rotation; with bias and residual."""
    n, rows = 5 * head_dim, 11
    case, dice = Case(256, n, group, exact=True), np.random.default_rng(5)
    bias = dice.integers(-9, 9, n).astype(np.float32)
    residual = bf16(dice.integers(-300, 300, (rows, n)))
    got = case.run(emulator, rows, mode=f"heads{head_dim}", rest=bias.tobytes() + residual.tobytes())
    assert np.array_equal(wide(got), nearest(nearest(case.truth(rows) + bias) + wide(residual)))


@pytest.mark.parametrize("shared", [HOPPER, SMALL])
@pytest.mark.parametrize("group", [128, 32, 0])
def test_inputs_in_several_chunks(emulator: str, group: int, shared: int) -> None:
    """5,120 inputs do not fit into shared memory together: x is staged in chunks, more of them for more rows."""
    case = Case(5120, 64, group)
    cut = (1, 0) if shared != SMALL or group != 32 else (-1, -1)  # few tilings fit there

    def run(rows: int, clusters: int) -> Array:
        return case.run(emulator, rows, clusters, *cut, shared=shared)

    few, many = run(8, 2), run(32, 2)
    assert np.array_equal(few, many[:8])  # a row's result depends only on the row
    assert np.array_equal(few[:1], run(1, 1))
    error = np.linalg.norm(many - case.truth(32)) / np.linalg.norm(case.truth(32))
    assert error < 1e-5


LARGE = [(2048, 768), (4096, 6144), (14336, 4096), (8192, 57344), (28672, 8192), (2048, 128256)]


def tiling(emulator: str, shape: tuple[int, int], group: int, shared: int, *concurrent: int) -> list[int]:
    numbers = map(str, (shared, *shape, group, *concurrent))
    done = subprocess.run([emulator, *numbers], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


@pytest.mark.parametrize("group", [128, 32, 0])
@pytest.mark.parametrize("shape", LARGE)
def test_plans_of_large_models(emulator: str, shape: tuple[int, int], group: int) -> None:
    """Tilings of Llama-3 shards: most of 132 SMs have work, and every warp has at least two tiles in flight. 40 rows
    are one launch, 320 are three with bf16 and five with int4."""
    blocks, strips, cluster, turns, *stages, some, many, _, _ = tiling(emulator, shape, group, HOPPER, 132, 66, 32, 16)
    assert blocks == 1 or group != 0  # bf16 is limited by memory and not by the latency of instructions
    assert blocks == 2 or group != 128 or shape == LARGE[0]  # whose tiles are few
    assert min(strips * turns * cluster, turns * cluster) >= 96
    assert min(stages) >= 2
    assert some == 40 and many == (128 if group == 0 else 64)


@pytest.mark.parametrize(("fours", "eights"), [(30, 14), (31, 15), (32, 16), (33, 16)])
def test_tilings_depend_on_the_number_of_concurrent_clusters(emulator: str, fours: int, eights: int) -> None:
    """Dies differ: the tiling for 32 clusters of 8 needs a second wave if only 30 of them run concurrently."""
    shapes = [(8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192), (14336, 4096), (8192, 2048)]
    costs = [tiling(emulator, shape, 128, HOPPER, 132, 66, fours, eights)[-2:] for shape in shapes]
    assert all(own <= other for own, other in costs)
    saved = 1 - sum(own for own, _ in costs) / sum(other for _, other in costs)
    assert saved > 0.02 if eights < 16 else saved < 0.02


@pytest.mark.parametrize("group", [128, 32, 0])
@pytest.mark.parametrize("part", [(100, 50, 24, 12), (32, 16, 7, 3), (5, 2, 1, 0)])
def test_a_part_of_a_gpu_has_tilings(emulator: str, part: tuple[int, ...], group: int) -> None:
    """Of 132 multiprocessors, for two models at the same time. Five hold no cluster of eight blocks."""
    for shape in LARGE:
        _, strips, cluster, turns, *_ = tiling(emulator, shape, group, HOPPER, *part)
        assert part[cluster.bit_length() - 1] > 0 and strips * turns * 32 >= shape[1]


@pytest.mark.parametrize("group", [128, 32, 0])
@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize(("shared", "count"), [(AMPERE, 108), (SMALL, 82), (SMALL, 128), (SMALL, 28)])
def test_plans_without_clusters(emulator: str, shape: tuple[int, int], group: int, shared: int, count: int) -> None:
    """Of an A100, RTX 3090, RTX 4090 and RTX 3060, without clusters: every number of rows fits. In 99 KB of shared
    memory the large-M kernel of bfloat16 fits with four warps."""
    blocks, strips, cluster, turns, *stages, some, many, _, _ = tiling(emulator, shape, group, shared, count, 0, 0, 0)
    assert blocks == 1 or shared == AMPERE  # 99 KB hold no two blocks
    assert cluster == 1 and min(stages) >= 1 and strips * turns * 32 >= shape[1]
    assert (some, many) == ((40, 64) if shared == AMPERE or group == 0 else (32, 32))
