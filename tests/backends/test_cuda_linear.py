"""Arguments that backends/cuda/linear.py rejects. native/test_cuda_tiles.py and gpu/ test its results."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swiftspec import _C
from swiftspec.backends.cuda import cuda, large_m
from swiftspec.backends.cuda import linear as cuda_linear
from swiftspec.errors import UserError
from swiftspec.model.packed_model import PackedLayer, PackedMlp
from swiftspec.model.weights import DenseWeight

WEIGHT = DenseWeight(torch.ones(32, 64, dtype=torch.bfloat16))
needs_cuda = pytest.mark.skipif(not _C.cuda_built, reason=_C.build_info)


def test_other_dtypes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_linear, "require_usable", torch.device)
    with pytest.raises(UserError, match="compute in bfloat16, not float16"):
        cuda_linear.pack(WEIGHT, torch.float16, "cuda:0")


@pytest.mark.parametrize("before", [True, False])
def test_library_products_sum_in_float32(before: bool) -> None:
    """Of products in two threads, which overlap, the last one restores torch's setting."""
    matmul: Any = torch.backends.cuda.matmul
    usual = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = before
    found: list[bool] = []
    with ExitStack() as first, ExitStack() as second:
        for thread in (first, second):
            thread.enter_context(large_m.float32_sums)
        for thread in (first, second):
            found.append(matmul.allow_bf16_reduced_precision_reduction)
            thread.close()
    found.append(matmul.allow_bf16_reduced_precision_reduction)
    matmul.allow_bf16_reduced_precision_reduction = usual
    assert found == [False, False, before]


def test_each_projection_prefetches_the_tiles_of_the_next() -> None:
    named: dict[str, torch.Tensor] = {}

    def matrix(name: str, tiles: int) -> Any:
        native = SimpleNamespace(precede=lambda found, name=name: named.update({name: found}))
        return SimpleNamespace(native=native, tiles=torch.empty(tiles, dtype=torch.uint8, device="meta"))

    sizes = {"qkv": 3, "o": cuda.PREFETCH_BYTES + 256, "gate_up": cuda.PREFETCH_BYTES + 512, "down": 5}
    layers: list[PackedLayer] = []
    for i in (0, 1):
        qkv, o, gate_up, down = (matrix(f"{name} {i}", size) for name, size in sizes.items())
        layers.append(PackedLayer(None, qkv, o, None, PackedMlp(gate_up, down)))
    stack: Any = SimpleNamespace(layers=layers, head=matrix("head", cuda.PREFETCH_BYTES + 1))
    assert cuda.fuse(stack) is None
    prefetched = {"qkv": cuda.PREFETCH_BYTES + 256, "o": cuda.PREFETCH_BYTES, "gate_up": 5, "down": 3}
    expected = {f"{name} {i}": size for i in (0, 1) for name, size in prefetched.items()} | {
        "down 1": cuda.PREFETCH_BYTES
    }
    assert {name: tiles.shape[0] for name, tiles in named.items()} == expected, "qkv for all of o"
    cuda.enable_weight_prefetch(stack, enabled=False)
    assert {tiles.shape[0] for tiles in named.values()} == {0}


@needs_cuda
@pytest.mark.parametrize(
    ("k", "n", "group", "cause"),
    [(7, 32, 0, "k must be"), (12, 32, 0, "8"), (64, 32, 48, "group must be"), (96, 32, 64, "divide k"),
     (64, 12, 32, "8 must divide n"), (64, 0, 0, "n must be")],
)  # fmt: skip
def test_shapes_without_a_tiling_are_refused(k: int, n: int, group: int, cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        _C.cuda_tile_bytes(k, n, group)


@needs_cuda
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 2}, "rank < size"),
        ({"inboxes": [64] * 9}, "1 to 8 ranks"),
        ({"inboxes": [8, 16]}, "an inbox is not aligned"),
        ({"inboxes": [0, 16]}, "an inbox is null"),
        ({"lines": 0}, "lines must be"),
        ({"error_word": torch.zeros(1, dtype=torch.int64)}, r"error_word: expected int64\[2\] on cpu, got int64\[1\]"),
        ({"epoch": torch.zeros(1)}, r"epoch: expected int64\[1\] on .*, got float32\[1\]"),
    ],
)
def test_channels_are_checked(change: dict[str, Any], message: str) -> None:
    word = torch.zeros(1, dtype=torch.int64)
    good = {"rank": 0, "inboxes": [64, 128], "lines": 4, "epoch": word, "done": word.int(),
            "error_word": torch.zeros(2, dtype=torch.int64)}  # fmt: skip
    with pytest.raises(ValueError, match=message):
        _C.CudaChannel(**(good | change))


@needs_cuda
def test_a_fault_names_rank_slot_and_epoch() -> None:
    assert _C.cuda_decode_fault(0) is None
    assert _C.cuda_decode_fault(1 << 56 | 3 << 48 | 5 << 40 | 2 << 32 | 77) == (3, 5, 2, 77)
