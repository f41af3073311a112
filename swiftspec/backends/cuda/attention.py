"""Tree attention on a GPU (csrc/cuda/attention): per layer one launch for RoPE and KV append and one for masked
attention, after one that normalises query and key heads where a model does.

Supports bfloat16 heads of dimension 64 or 128 and a bfloat16 or float8 cache. A row's result is bitwise independent of
the other rows of its batch, of their number, and of the slots in which its keys lie. Nothing here synchronises with the
device, and grids depend on shapes only, so a forward can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cuda.torch_interop import current_stream, native_cache
from swiftspec.model.batch import Batch
from swiftspec.model.packed_model import PLAIN_ATTENTION, AttentionOptions, KVTensors

HEAD_DIMS = (64, 128)
MAX_HEADS_PER_KV_HEAD = 64  # query heads that share one key-value head
# Bounds the scratch memory of a launch. More rows take several launches, which is correct because only prefill chunks
# have more, and no row of a prefill chunk attends to a later one.
MAX_ROWS_PER_LAUNCH = 256
# Keys of a part with and without clusters, and largest number of parts without (csrc/cuda/attention/sizes.h)
CLUSTER_PART_KEYS, BLOCK_PART_KEYS, MAX_BLOCK_PARTS = 1024, 64, 64
WORD_BYTES = 4
CLUSTER_MAJORS = (9, 10, 11)  # compute capabilities with thread block clusters that the kernel uses (csrc/cuda/arch.h)


class HeadNorm(Protocol):
    """RMSNorm with weight [heads + kv_heads, head_dim]; `CudaNorm` implements it."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def eps(self) -> float: ...


@dataclass(frozen=True, slots=True)
class CudaAttentionPlan:
    """Inputs of attention that are the same in every layer of a forward."""

    slices: list[tuple[slice, _C.CudaAttention]]  # one per launch: its rows, and the native arguments
    out_width: int


def prepare(
    batch: Batch, cache: KVTensors, cos: Tensor, sin: Tensor, num_heads: int,
    options: AttentionOptions = PLAIN_ATTENTION,
) -> CudaAttentionPlan:  # fmt: skip
    """Prepares the attention of a forward, before its layers. `cos` and `sin` are the tables of `rope_tables`. The slot
    of every row must lie in the window of the mask, as `Batch` requires. `options`: the defaults, see
    `check_supported`."""
    assert not options.in_use
    _, sequences, kv_heads, capacity, dim = cache.k.shape
    rows, width = batch.mask.shape
    device = cache.k.device

    def scratch(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    stored = native_cache(cache.k, cache.v)
    lines = _C.attention_lines_cuda(min(rows, MAX_ROWS_PER_LAUNCH), num_heads, capacity)
    values, sums = scratch(lines, dim, dtype=torch.float32), scratch(lines, 2, dtype=torch.float32)
    queries = scratch(min(rows, MAX_ROWS_PER_LAUNCH), num_heads * dim, dtype=torch.bfloat16)
    slices: list[tuple[slice, _C.CudaAttention]] = []
    for start in range(0, rows, MAX_ROWS_PER_LAUNCH):
        chunk, count = slice(start, start + MAX_ROWS_PER_LAUNCH), min(rows - start, MAX_ROWS_PER_LAUNCH)
        groups = _C.attention_groups_cuda(count, num_heads, kv_heads, sequences == 1)
        lines = _C.attention_lines_cuda(count, num_heads, capacity)
        native = _C.CudaAttention(
            cos=cos,
            sin=sin,
            positions=batch.positions[chunk],
            slots=batch.slots[chunk],
            sequence=batch.sequence[chunk] if sequences > 1 else None,
            kv_len=batch.kv_len,
            mask=batch.mask[chunk],
            cache=stored,
            heads=num_heads,
            queries=queries[:count],
            tail=scratch(count, width),
            count=scratch(count),
            groups=scratch(groups, _C.ROW_GROUP_WORDS),
            arrived=scratch(groups, kv_heads),
            part_values=values[:lines],
            part_sums=sums[:lines],
        )
        native.prepare(current_stream())
        slices.append((chunk, native))
    return CudaAttentionPlan(slices, num_heads * dim)


def scratch_bytes(rows: int, heads: int, head_dim: int, capacity: int, clusters: bool) -> int:
    """Returns the bytes that `prepare` allocates for a prefill chunk of `rows` rows, without group tables. `clusters`:
    whether the GPU has thread block clusters."""
    keys = CLUSTER_PART_KEYS
    if not clusters:
        keys = BLOCK_PART_KEYS * max(-(-capacity // (BLOCK_PART_KEYS * MAX_BLOCK_PARTS)), 1)
    columns = min(rows, MAX_ROWS_PER_LAUNCH) * heads
    queries = torch.bfloat16.itemsize * columns * head_dim
    # tail: rows x window, here the chunk
    return queries + WORD_BYTES * (columns * -(-capacity // keys) * (head_dim + 2) + rows * rows)


def tree_attention(qkv: Tensor, plan: CudaAttentionPlan, layer: int, qk_norm: HeadNorm | None = None) -> Tensor:
    """Applies RoPE, appends keys and values to the cache, and computes masked attention: qkv [rows, (heads + 2 *
    kv_heads) * head_dim] -> [rows, heads * head_dim].

    `qk_norm`: RMSNorm of each query and key head before RoPE, which overwrites them in `qkv`.
    """
    if qk_norm is not None:
        _C.norm_heads_cuda(qkv, qk_norm.weight, qk_norm.eps, current_stream())
    out = qkv.new_empty(qkv.shape[0], plan.out_width)
    for chunk, native in plan.slices:
        native.attend(qkv[chunk], layer, out[chunk], current_stream())
    return out
