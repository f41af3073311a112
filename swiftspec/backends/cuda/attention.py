"""Tree attention on a Hopper GPU: RoPE, KV append and masked attention, one launch a layer (csrc/cuda/attention).

For bfloat16 heads of 64 or 128. A row's result does not depend, to the bit, on the other rows of its batch, on their
number, or on the slots in which its keys lie. Nothing here waits for the device, so a forward can be captured in a
graph: its grid depends on the shapes alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cuda.checks import check, current_stream
from swiftspec.model.batch import Batch
from swiftspec.model.stack import Cache

HEAD_DIMS = (64, 128)
MOST_HEADS = 64  # that share keys


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What attention needs and is the same in every layer."""

    native: _C.CudaAttention
    kept: tuple[Tensor, ...]  # the tensors that it points to
    qkv_shape: tuple[int, int]
    out_width: int
    device: torch.device
    keys: int  # address of layer 0
    values: int
    stride: int  # bytes from one layer to the next


def prepare(batch: Batch, cache: Cache, cos: Tensor, sin: Tensor, num_heads: int) -> AttentionPlan:
    """Once per forward, before the layers. `cos` and `sin` are the tables of `rope_tables`. Every row's own slot must
    lie in the window of the mask, as `Batch` says."""
    _, sequences, kv_heads, capacity, dim = cache.k.shape
    rows, width = batch.mask.shape
    device, whole = cache.k.device, torch.int64
    table = (cos.shape[0], dim)
    check("keys", cache.k, torch.bfloat16, cache.k.shape, device)
    check("values", cache.v, torch.bfloat16, cache.k.shape, device)

    def scratch(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    groups = _C.attention_groups_cuda(rows, num_heads, kv_heads, sequences == 1)
    lines = _C.attention_lines_cuda(rows, num_heads, capacity)
    owner, tail, count = scratch(sequences, capacity), scratch(rows, width), scratch(rows)
    table_of_groups, arrived = scratch(groups, 4), scratch(groups, kv_heads)
    part_values, part_sums = (scratch(lines, size, dtype=torch.float32) for size in (dim, 2))
    native = _C.CudaAttention(
        cos=check("cos", cos, torch.bfloat16, table, device),
        sin=check("sin", sin, torch.bfloat16, table, device),
        positions=check("positions", batch.positions, whole, (rows,), device),
        slots=check("slots", batch.slots, whole, (rows,), device),
        sequence=check("sequence", batch.sequence, whole, (rows,), device) if sequences > 1 else 0,
        kv_len=check("kv_len", batch.kv_len, whole, (sequences,), device),
        mask=check("mask", batch.mask, torch.bool, (rows, width), device),
        owner=owner.data_ptr(),
        tail=tail.data_ptr(),
        count=count.data_ptr(),
        groups=table_of_groups.data_ptr(),
        arrived=arrived.data_ptr(),
        part_values=part_values.data_ptr(),
        part_sums=part_sums.data_ptr(),
        rows=rows,
        width=width,
        sequences=sequences,
        heads=num_heads,
        kv_heads=kv_heads,
        capacity=capacity,
        dim=dim,
        clusters=_C.attention_clusters_cuda(dim),
    )
    native.prepare(current_stream())
    inputs = (cos, sin, batch.positions, batch.slots, batch.sequence, batch.kv_len, batch.mask, cache.k, cache.v)
    return AttentionPlan(
        native,
        (*inputs, owner, tail, count, table_of_groups, arrived, part_values, part_sums),
        (rows, (num_heads + 2 * kv_heads) * dim),
        num_heads * dim,
        device,
        cache.k.data_ptr(),
        cache.v.data_ptr(),
        cache.k.stride(0) * cache.k.element_size(),
    )


def tree_attention(qkv: Tensor, plan: AttentionPlan, layer: int) -> Tensor:
    """RoPE, KV append, masked attention: qkv [n, (H + 2G) hd] -> [n, H hd]."""
    source = check("qkv", qkv, torch.bfloat16, plan.qkv_shape, plan.device)
    out = qkv.new_empty(qkv.shape[0], plan.out_width)
    skipped = layer * plan.stride
    plan.native.attend(source, plan.keys + skipped, plan.values + skipped, out.data_ptr(), current_stream())
    return out
