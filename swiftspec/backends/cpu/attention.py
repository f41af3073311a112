"""Masked attention of the CPU backend. Shapes as in reference/__init__.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cpu.linear import CpuNorm
from swiftspec.model.batch import Batch
from swiftspec.model.packed_model import PLAIN_ATTENTION, AttentionOptions, KVTensors, ProjectionNorm


@dataclass(frozen=True, slots=True)
class CpuSequenceRows:
    """Attention inputs of the m rows of one sequence in a batch."""

    rows: Tensor | None  # [m] int64, indices of the rows in the batch; None: all rows of the batch
    cos: Tensor  # [m, head_dim]
    sin: Tensor  # [m, head_dim]
    slots: Tensor  # [m] int64, slots to write
    mask: Tensor  # [m, window] bool; window is at most `length`
    length: int  # slots in use
    sequence: int  # index in the cache
    query_scale: Tensor | None = None  # [m] float32


@dataclass(frozen=True, slots=True)
class CpuAttentionPlan:
    """Inputs of attention that are the same in every layer of one kind in a forward."""

    parts: list[CpuSequenceRows]
    cache: _C.Cache
    out_width: int
    options: AttentionOptions = PLAIN_ATTENTION


def prepare(
    batch: Batch,
    cache: KVTensors,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    options: AttentionOptions = PLAIN_ATTENTION,
) -> CpuAttentionPlan:
    """Prepares the attention of a forward, before its layers. `cos` and `sin` are the tables of `rope_tables`."""
    parts: list[CpuSequenceRows] = []
    for rows, slots, mask, length, sequence in sequence_rows(batch, cache.k.shape[1]):
        positions = batch.positions if rows is None else batch.positions[rows]
        scale = None if options.query_scale is None else options.query_scale.index_select(0, positions)
        tables = cos.index_select(0, positions), sin.index_select(0, positions)
        parts.append(CpuSequenceRows(rows, *tables, slots, mask, length, sequence, scale))
    return CpuAttentionPlan(parts, _C.Cache(cache.k, cache.v), num_heads * cache.k.shape[4], options)


def sequence_rows(batch: Batch, sequences: int) -> Iterator[tuple[Tensor | None, Tensor, Tensor, int, int]]:
    """Yields for each sequence of a batch the indices of its rows (None: all), their slots and mask, the number of
    slots in use and the sequence. `sequences`: number of sequences of the cache."""
    present = [0] if sequences == 1 else sorted(set(batch.sequence.tolist()))
    lengths = batch.kv_len.tolist()
    for sequence in present:
        rows = None if len(present) == 1 else (batch.sequence == sequence).nonzero().squeeze(1)
        slots, mask = (batch.slots, batch.mask) if rows is None else (batch.slots[rows], batch.mask[rows])
        length = lengths[sequence]
        yield rows, slots.contiguous(), mask[:, max(mask.shape[1] - length, 0) :].contiguous(), length, sequence


def tree_attention(
    qkv: Tensor, plan: CpuAttentionPlan, layer: int, qk_norm: CpuNorm | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Applies RoPE, appends keys and values to the cache, and computes masked attention: qkv [rows, (heads + 2 *
    kv_heads) * head_dim] -> [rows, heads * head_dim]. With queries only (a shared KV layer), qkv [rows, heads *
    head_dim], the rows attend to the keys and values that an earlier layer has appended.

    `layer`: index of the layer in the cache. `qk_norm`: RMSNorm of each query and key head before RoPE, or after it
    with the option `norm_after_rope`, with weight [heads + kv_heads, head_dim]; with weight [heads + 2 * kv_heads,
    head_dim] also of each value head. `sinks`: [heads] float32, a logit of each query head that adds its exponential to
    the denominator of the softmax (attention sink).
    """
    qkv = qkv.contiguous()  # with an output gate it is a part of the product
    options, (weight, eps) = plan.options, (None, 0.0) if qk_norm is None else (qk_norm.weight, qk_norm.eps)
    sums, sizes = None, (0, 0)
    if options.projection_norm is not None:
        sums, sizes = _projection_sums(qkv, plan, options.projection_norm)
    out = qkv.new_empty(qkv.shape[0], plan.out_width)
    for part in plan.parts:
        mine = qkv if part.rows is None else qkv[part.rows]
        result = out if part.rows is None else out.new_empty(mine.shape[0], out.shape[1])
        _C.attention(
            mine,
            part.cos,
            part.sin,
            part.slots,
            part.mask,
            plan.cache,
            layer,
            part.sequence,
            part.length,
            result,
            weight,
            eps,
            options.window,
            options.scale,
            options.softcap,
            part.query_scale,
            bool(options.norm_after_rope),
            sums if sums is None or part.rows is None else sums[part.rows],
            *sizes,
            sinks,
        )
        if part.rows is not None:
            out[part.rows] = result
    return out


def _projection_sums(qkv: Tensor, plan: CpuAttentionPlan, whole: ProjectionNorm) -> tuple[Tensor, tuple[int, int]]:
    """Returns the sums of squares of all query heads and of all key heads of all ranks, [rows, 2], and their numbers of
    elements."""
    dim = plan.parts[0].cos.shape[1]
    heads = plan.out_width // dim
    sums = torch.empty(qkv.shape[0], 2)
    _C.projection_sums(qkv, heads, (qkv.shape[1] // dim - heads) // 2, dim, whole.counted, sums)
    return sums if whole.reduce is None else whole.reduce(sums), (whole.q_size, whole.k_size)


def make_slot_mover(k: Tensor, v: Tensor) -> Callable[[int, Sequence[int], int], None]:
    """Returns `move(sequence, source, start)`, which moves slot source[i] of a sequence to slot start + i, in place and
    in all layers of the KV cache `k`, `v`. `source` must be ascending, with source[i] >= start + i."""
    return _C.Cache(k, v).move
