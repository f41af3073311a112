"""Tree attention on a GPU (csrc/cuda/attention): per layer one launch for RoPE and KV append and one for masked
attention, after one that normalises query and key heads where a model does. Of few rows the QKV projection applies RoPE
and appends.

Supports bfloat16 heads of dimension 64 or 128 and a bfloat16 or float8 cache. A row's result is bitwise independent of
the other rows of its batch, of their number, and of the slots in which its keys lie. Nothing here synchronises with the
device, and grids depend on shapes only, so a forward can be captured in a CUDA graph.

Prefill chunks of MIN_FLASH_ROWS rows and more use torch's flash attention after RoPE and append. They are never
captured, and the last bits of their results may depend on the chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cuda.norm import CudaNorm
from swiftspec.backends.cuda.torch_interop import current_stream, native_cache
from swiftspec.model.batch import Batch, Chain
from swiftspec.model.packed_model import PLAIN_ATTENTION, AttentionOptions, KVTensors

HEAD_DIMS = (64, 128)
MAX_HEADS_PER_KV_HEAD = 64  # query heads that share one key-value head
MIN_FLASH_ROWS = 33  # more than a captured batch has (runtime/executors/graph.py)
# Bounds the scratch memory of a launch. More rows take several launches, which is correct because only populations and
# prefill chunks have more, and none of their rows attends to a later one.
MAX_ROWS_PER_LAUNCH = 256
# Fewest keys of a turn with and without clusters, and largest number of parts of a sequence
# (csrc/cuda/attention/sizes.h)
CLUSTER_TURN_KEYS, BLOCK_TURN_KEYS, MAX_PARTS = 256, 64, 64
MAX_CLUSTERS, MAX_BLOCKS = 80, 160  # that run concurrently on the largest GPUs
WORD_BYTES = 4
CLUSTER_MAJORS = (9, 10, 11)  # compute capabilities with thread block clusters that the kernel uses (csrc/cuda/arch.h)


def heads_name(heads: int, kv_heads: int, head_dim: int, default: str) -> str:
    """Returns the name of a model's attention heads, under which the shape of its kernel is kept. `default`: the shape
    that it replaces, since longer caches have another one."""
    return f"{heads}/{kv_heads} heads of {head_dim}, {default}"


def attention_shapes(capacity: int) -> list[str]:
    """Returns the default shape of the kernel for a cache of `capacity` slots, then the others of the current GPU."""
    return _C.attention_shapes_cuda(capacity)


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """Causal attention of a prefill chunk by torch's flash attention; its inputs are the same in every layer."""

    cos: Tensor
    sin: Tensor
    batch: Batch
    stored: _C.CudaCache
    keys: Tensor  # [layers, kv_heads, kv_len, head_dim], views of the cache
    values: Tensor
    queries: Tensor  # [rows, heads, head_dim], scratch

    @staticmethod
    def of(batch: Batch, chain: Chain, cache: KVTensors, cos: Tensor, sin: Tensor, num_heads: int) -> FlashAttention:
        keys, values = (part[:, chain.sequence, :, : chain.kv_len] for part in (cache.k, cache.v))
        queries = torch.empty(len(batch), num_heads, cache.k.shape[-1], dtype=torch.bfloat16, device=cache.k.device)
        return FlashAttention(
            cos=cos,
            sin=sin,
            batch=batch,
            stored=native_cache(cache.k, cache.v),
            keys=keys,
            values=values,
            queries=queries,
        )

    def attend(self, qkv: Tensor, layer: int) -> Tensor:
        """As `tree_attention`."""
        batch = self.batch
        sequence = batch.sequence if batch.kv_len.shape[0] > 1 else None
        _C.rope_append_cuda(
            qkv,
            self.cos,
            self.sin,
            batch.positions,
            batch.slots,
            sequence,
            cache=self.stored,
            layer=layer,
            queries=self.queries,
            stream=current_stream(),
        )
        q = self.queries.transpose(0, 1).unsqueeze(0)
        k, v = (part[layer].unsqueeze(0).to(q.dtype) for part in (self.keys, self.values))
        return _flash_attention(q, k, v).transpose(1, 2).reshape(len(batch), -1)


@dataclass(frozen=True, slots=True)
class CudaAttentionPlan:
    """Inputs of attention that are the same in every layer of a forward."""

    slices: list[tuple[slice, _C.CudaAttention]]  # one per launch: its rows, and the native arguments
    out_width: int
    flash: FlashAttention | None = None  # computes the attention without the `slices`


def prepare(
    batch: Batch,
    cache: KVTensors,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    options: AttentionOptions = PLAIN_ATTENTION,
    shape: str | None = None,
) -> CudaAttentionPlan:
    """Prepares the attention of a forward, before its layers. `cos` and `sin` are the tables of `rope_tables`. The slot
    of every row must lie in the window of the mask, as `Batch` requires. `options`: the defaults, see
    `check_supported`. `shape`: "short", "long" or "paired", the division into blocks on GPUs with clusters
    (csrc/cuda/attention/sizes.h); None: by the capacity of the cache."""
    assert not options.in_use
    _, sequences, kv_heads, capacity, dim = cache.k.shape
    rows, width = batch.mask.shape
    device = cache.k.device
    if batch.chain is not None and rows >= MIN_FLASH_ROWS:
        return CudaAttentionPlan([], num_heads * dim, FlashAttention.of(batch, batch.chain, cache, cos, sin, num_heads))

    def scratch(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    stored = native_cache(cache.k, cache.v)
    lines = _C.attention_lines_cuda(min(rows, MAX_ROWS_PER_LAUNCH), num_heads, kv_heads, capacity, shape)
    values, sums = scratch(lines, dim, dtype=torch.float32), scratch(lines, 2, dtype=torch.float32)
    queries = scratch(min(rows, MAX_ROWS_PER_LAUNCH), num_heads * dim, dtype=torch.bfloat16)
    slices: list[tuple[slice, _C.CudaAttention]] = []
    for start in range(0, rows, MAX_ROWS_PER_LAUNCH):
        chunk, count = slice(start, start + MAX_ROWS_PER_LAUNCH), min(rows - start, MAX_ROWS_PER_LAUNCH)
        groups = _C.attention_groups_cuda(count, num_heads, kv_heads, sequences == 1)
        lines = _C.attention_lines_cuda(count, num_heads, kv_heads, capacity, shape)
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
            shape=shape,
        )
        native.prepare(current_stream())
        slices.append((chunk, native))
    return CudaAttentionPlan(slices, num_heads * dim)


def scratch_bytes(rows: int, heads: int, kv_heads: int, head_dim: int, capacity: int, clusters: bool) -> int:
    """Returns the bytes of queries and outputs of a prefill chunk of `rows` rows, and of partial results over the keys
    of as many other rows as a launch has. `clusters`: whether the GPU has thread block clusters."""
    keys, concurrent = (CLUSTER_TURN_KEYS, MAX_CLUSTERS) if clusters else (BLOCK_TURN_KEYS, MAX_BLOCKS)
    parts = min(-(-capacity // keys), max(concurrent // kv_heads, 1), MAX_PARTS)
    both = 2 * torch.bfloat16.itemsize * rows * heads * head_dim
    return both + WORD_BYTES * MAX_ROWS_PER_LAUNCH * heads * parts * (head_dim + 2)


def tree_attention(
    qkv: Tensor, plan: CudaAttentionPlan, layer: int, qk_norm: CudaNorm | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Applies RoPE, appends keys and values to the cache, and computes masked attention: qkv [rows, (heads + 2 *
    kv_heads) * head_dim] -> [rows, heads * head_dim].

    `qk_norm`: RMSNorm of each query and key head before RoPE, which overwrites them in `qkv`. `sinks`: None, see
    `check_supported`.
    """
    assert sinks is None
    if qk_norm is not None:
        _C.norm_heads_cuda(qkv, qk_norm.weight, qk_norm.eps, current_stream())
    if plan.flash is not None:
        return plan.flash.attend(qkv, layer)
    out = qkv.new_empty(qkv.shape[0], plan.out_width)
    for chunk, native in plan.slices:
        native.attend(qkv[chunk], layer, out[chunk], current_stream())
    return out


def project_and_attend(
    x: Tensor, norm: CudaNorm, weights: _C.CudaWeights, plan: CudaAttentionPlan, layer: int
) -> Tensor | None:
    """Applies RMSNorm and the QKV projection `weights`, whose kernel applies RoPE and appends keys and values, and
    computes masked attention: x [rows, hidden] -> [rows, heads * head_dim]. The bits are those of the projection and
    `tree_attention`. Returns None if the kernel cannot append: of more than 8 rows, or with other tiles."""
    if len(plan.slices) != 1 or not plan.slices[0][1].appends(weights):
        return None
    out = x.new_empty(x.shape[0], plan.out_width)
    plan.slices[0][1].project_and_attend(
        weights, x, norm.weight, norm.eps, layer=layer, out=out, stream=current_stream()
    )
    return out


def make_slot_mover(k: Tensor, v: Tensor) -> Callable[[int, Sequence[int], int], None]:
    """Returns a function that moves slots of a KV cache; see reference/attention.py."""
    native = native_cache(k, v)

    def move(sequence: int, source: Sequence[int], start: int) -> None:
        if source:
            native.move(sequence, source, start, current_stream())

    return move


def _flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of rows that are the last ones of a sequence: q [1, heads, rows, head_dim], k and v [1, kv_heads,
    kv_len, head_dim] -> [1, heads, rows, head_dim].

    The operator is called by its name, since `F.scaled_dot_product_attention` aligns a causal mask with the first key
    instead of the last, and may choose a kernel that compiles for every new length.
    """
    if q.device.type == "cuda":
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]
    rows, keys = q.shape[2], k.shape[2]  # the emulated GPU
    mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
