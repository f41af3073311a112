"""Masked attention of the CPU backend. Shapes as in reference/__init__.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cpu.decoder import option_args
from swiftspec.backends.cpu.linear import CpuNorm
from swiftspec.model.batch import Batch
from swiftspec.model.packed_model import PLAIN_ATTENTION, AttentionOptions, KVTensors, ProjectionNorm


class CpuSequenceRows(NamedTuple):
    """The m rows of one sequence in a batch."""

    rows: Tensor | None  # [m] int64, indices of the rows in the batch; None: all rows of the batch
    slots: Tensor  # [m] int64, slots to write
    mask: Tensor  # [m, window] bool; window is at most `length`
    length: int  # slots in use
    sequence: int  # index in the cache


@dataclass(frozen=True, slots=True)
class CpuAttentionPlan:
    """Inputs of attention that are the same in every layer of one kind in a forward."""

    parts: list[tuple[Tensor | None, _C.AttentionRows]]  # by sequence: indices of its rows (None: all), and the rows
    num_heads: int
    head_dim: int
    projection_norm: ProjectionNorm | None = None


def prepare(
    batch: Batch,
    cache: KVTensors,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    options: AttentionOptions = PLAIN_ATTENTION,
) -> CpuAttentionPlan:
    """Prepares the attention of a forward; see reference/attention.py."""
    native = _C.Cache(cache.k, cache.v)
    parts: list[tuple[Tensor | None, _C.AttentionRows]] = []
    for part in sequence_rows(batch, cache.k.shape[1]):
        positions = batch.positions if part.rows is None else batch.positions[part.rows]
        scale = None if options.query_scale is None else options.query_scale.index_select(0, positions)
        rows = _C.AttentionRows(
            cos.index_select(0, positions),
            sin.index_select(0, positions),
            part.slots,
            part.mask,
            native,
            part.sequence,
            length=part.length,
            options=option_args(options, scale),
        )
        parts.append((part.rows, rows))
    return CpuAttentionPlan(parts, num_heads, cache.k.shape[4], options.projection_norm)


def sequence_rows(batch: Batch, sequences: int) -> Iterator[CpuSequenceRows]:
    """Yields the rows of each sequence of a batch. `sequences`: number of sequences of the cache."""
    present = [0] if sequences == 1 else sorted(set(batch.sequence.tolist()))
    lengths = batch.kv_len.tolist()
    for sequence in present:
        rows = None if len(present) == 1 else (batch.sequence == sequence).nonzero().squeeze(1)
        slots, mask = (batch.slots, batch.mask) if rows is None else (batch.slots[rows], batch.mask[rows])
        length = lengths[sequence]
        window = mask[:, max(mask.shape[1] - length, 0) :].contiguous()
        yield CpuSequenceRows(rows, slots.contiguous(), window, length, sequence)


def tree_attention(
    qkv: Tensor, plan: CpuAttentionPlan, layer: int, qk_norm: CpuNorm | None = None, sinks: Tensor | None = None
) -> Tensor:
    """RoPE, KV append and masked attention; see reference/attention.py. `sinks`: float32."""
    qkv = qkv.contiguous()  # with an output gate it is a part of the product
    norm, whole = None if qk_norm is None else (qk_norm.weight, qk_norm.eps), plan.projection_norm
    squares = None if whole is None else _projection_sums(qkv, plan, whole)
    out = qkv.new_empty(qkv.shape[0], plan.num_heads * plan.head_dim)
    for rows, native in plan.parts:
        mine = qkv if rows is None else qkv[rows]
        result = out if rows is None else out.new_empty(mine.shape[0], out.shape[1])
        sums = None
        if squares is not None and whole is not None:
            sums = squares if rows is None else squares[rows], whole.q_size, whole.k_size
        native.attend(mine, layer, result, norm, sums, sinks)
        if rows is not None:
            out[rows] = result
    return out


def _projection_sums(qkv: Tensor, plan: CpuAttentionPlan, whole: ProjectionNorm) -> Tensor:
    """Returns the sums of squares of all query heads and of all key heads of all ranks, [rows, 2]."""
    heads, dim = plan.num_heads, plan.head_dim
    sums = torch.empty(qkv.shape[0], 2)
    _C.projection_sums(qkv, heads, (qkv.shape[1] // dim - heads) // 2, dim, whole.counted, sums)
    return sums if whole.reduce is None else whole.reduce(sums)


def make_slot_mover(k: Tensor, v: Tensor) -> Callable[[int, Sequence[int], int], None]:
    """Returns a function that moves slots of a KV cache; see reference/attention.py."""
    return _C.Cache(k, v).move
