"""Tree attention on a GPU: RoPE, KV append and masked attention, one launch a layer (csrc/cuda/attention).

For bfloat16 heads of 64 or 128, over a cache of bfloat16 or of float8. A row's result does not depend, to the bit, on
the other rows of its batch, on their number, or on the slots in which its keys lie. Nothing here waits for the device,
so a forward can be captured in a graph: its grid depends on the shapes alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cuda.checks import current_stream, native_cache
from swiftspec.model.batch import Batch
from swiftspec.model.packed_model import Cache

HEAD_DIMS = (64, 128)
MAX_HEADS_PER_KV_HEAD = 64  # that share keys
# rows of one launch, which bounds its scratch; of more rows, a prompt's, none sees a later one
MAX_ROWS_PER_LAUNCH = 256


@dataclass(frozen=True, slots=True)
class CudaAttentionPlan:
    """What attention needs and is the same in every layer."""

    slices: list[tuple[slice, _C.CudaAttention]]
    out_width: int


def prepare(batch: Batch, cache: Cache, cos: Tensor, sin: Tensor, num_heads: int) -> CudaAttentionPlan:
    """Once per forward, before the layers. `cos` and `sin` are the tables of `rope_tables`. Every row's own slot must
    lie in the window of the mask, as `Batch` says."""
    _, sequences, kv_heads, capacity, dim = cache.k.shape
    rows, width = batch.mask.shape
    device = cache.k.device

    def scratch(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    stored = native_cache(cache.k, cache.v)
    lines = _C.attention_lines_cuda(min(rows, MAX_ROWS_PER_LAUNCH), num_heads, capacity)
    values, sums = scratch(lines, dim, dtype=torch.float32), scratch(lines, 2, dtype=torch.float32)
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
            owner=scratch(sequences, capacity),
            tail=scratch(count, width),
            count=scratch(count),
            groups=scratch(groups, 4),
            arrived=scratch(groups, kv_heads),
            part_values=values[:lines],
            part_sums=sums[:lines],
        )
        native.prepare(current_stream())
        slices.append((chunk, native))
    return CudaAttentionPlan(slices, num_heads * dim)


def tree_attention(qkv: Tensor, plan: CudaAttentionPlan, layer: int) -> Tensor:
    """RoPE, KV append, masked attention: qkv [n, (H + 2G) hd] -> [n, H hd]."""
    out = qkv.new_empty(qkv.shape[0], plan.out_width)
    for chunk, native in plan.slices:
        native.attend(qkv[chunk], layer, out[chunk], current_stream())
    return out
