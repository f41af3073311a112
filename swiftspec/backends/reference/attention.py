"""RoPE and masked attention over a KV cache. Shapes as in reference/__init__.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec.backends.reference.linear import rms_norm
from swiftspec.backends.reference.packing import ReferenceNorm
from swiftspec.model.batch import Batch
from swiftspec.model.packed_model import KVTensors
from swiftspec.model.spec import RopeSpec


def rope_tables(
    rope: RopeSpec, head_dim: int, length: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Returns the RoPE tables cos and sin [length, head_dim]. The sine includes the sign of the rotation:
    x' = x * cos + roll(x, head_dim / 2) * sin.

    Angles are computed in float32 for every model dtype, as in transformers' modeling_rope_utils.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = _scale_frequencies(1.0 / (rope.theta**exponents), rope)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    cos, sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    return torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)


def _scale_frequencies(frequencies: Tensor, rope: RopeSpec) -> Tensor:
    """Applies RoPE scaling to `frequencies`. "llama3" keeps high frequencies, divides low ones by the factor, and
    interpolates in between."""
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    wavelengths = rope.original_max_position / (2 * math.pi / frequencies)  # number of periods in the original context
    share = (wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = (1 - share) * frequencies / rope.factor + share * frequencies
    stretched = torch.where(wavelengths < rope.low_freq_factor, frequencies / rope.factor, blend)
    return torch.where(wavelengths > rope.high_freq_factor, frequencies, stretched)


@dataclass(frozen=True, slots=True)
class ReferenceSequenceRows:
    """Attention inputs of the m rows of one sequence in a batch. The lists contain one view of the cache per layer."""

    rows: Tensor | None  # [m] int64, indices of the rows in the batch; None: all rows of the batch
    slots: Tensor | None  # [m] int64, slots to write; None: the targets are views of exactly these slots
    key_targets: list[Tensor]  # [m, kv_heads, head_dim], or with `slots` [capacity, kv_heads, head_dim]
    value_targets: list[Tensor]
    keys: list[Tensor]  # [1, kv_heads, length, head_dim], the slots in use
    values: list[Tensor]
    mask: Tensor | None  # [1, 1, heads / kv_heads * m, length], added to the scores; None: all slots are visible


@dataclass(frozen=True, slots=True)
class ReferenceAttentionPlan:
    """Inputs of attention that are the same in every layer of a forward."""

    cos: Tensor  # [rows, 1, head_dim]
    sin: Tensor  # [rows, 1, head_dim]
    num_heads: int
    parts: list[ReferenceSequenceRows]


def prepare(batch: Batch, cache: KVTensors, cos: Tensor, sin: Tensor, num_heads: int) -> ReferenceAttentionPlan:
    """Prepares the attention of a forward, before its layers. `cos` and `sin` are the tables of `rope_tables`."""
    lengths = batch.kv_len.tolist()
    present = sorted(set(batch.sequence.tolist()))
    parts: list[ReferenceSequenceRows] = []
    for sequence in present:
        rows = None if len(present) == 1 else (batch.sequence == sequence).nonzero().squeeze(1)
        parts.append(_sequence_rows(batch, cache, sequence, rows, lengths[sequence], num_heads, cos.dtype))
    cos, sin = cos.index_select(0, batch.positions), sin.index_select(0, batch.positions)
    return ReferenceAttentionPlan(cos.unsqueeze(1), sin.unsqueeze(1), num_heads, parts)


def _sequence_rows(
    batch: Batch, cache: KVTensors, sequence: int, rows: Tensor | None, length: int, num_heads: int, dtype: torch.dtype
) -> ReferenceSequenceRows:
    slots, window = (each if rows is None else each[rows] for each in (batch.slots, batch.mask))
    indices = slots.tolist()
    first, count = indices[0], len(indices)
    run = indices == list(range(first, first + count))
    target = slice(first, first + count) if run else slice(None)
    k, v = cache.k[:, sequence : sequence + 1], cache.v[:, sequence : sequence + 1]
    to_k, to_v = (list(part[:, 0, :, target].transpose(1, 2).unbind(0)) for part in (k, v))
    keys, values = (list(part[:, :, :, :length].unbind(0)) for part in (k, v))
    mask = _mask(window, length, num_heads // cache.k.shape[2], dtype)
    return ReferenceSequenceRows(rows, None if run else slots, to_k, to_v, keys, values, mask)


def _mask(window: Tensor, length: int, group: int, dtype: torch.dtype) -> Tensor | None:
    """Converts a bool mask [rows, window], right-aligned at `length`, to one of 0 and -inf [1, 1, group * rows,
    length]: the rows repeated for each of the `group` query heads that share keys. Returns None if all slots are
    visible."""
    window = window[:, max(window.shape[1] - length, 0) :]
    if window.all():
        return None
    mask = torch.zeros(window.shape[0], length, dtype=dtype, device=window.device)
    mask[:, length - window.shape[1] :].masked_fill_(~window, -math.inf)
    return mask.expand(group, -1, -1).reshape(1, 1, -1, length)


def tree_attention(
    qkv: Tensor, plan: ReferenceAttentionPlan, layer: int, qk_norm: ReferenceNorm | None = None
) -> Tensor:
    """Applies RoPE, appends keys and values to the cache, and computes masked attention: qkv [rows, (heads + 2 *
    kv_heads) * head_dim] -> [rows, heads * head_dim].

    `qk_norm`: RMSNorm of each query and key head before RoPE, with weight [heads + kv_heads, head_dim].
    """
    rows, head_dim = qkv.shape[0], plan.cos.shape[-1]
    heads = qkv.view(rows, -1, head_dim)
    kv_heads = (heads.shape[1] - plan.num_heads) // 2
    rotated, v = heads.split((plan.num_heads + kv_heads, kv_heads), 1)
    if qk_norm is not None:
        rotated = rms_norm(rotated, qk_norm)
    # three operations: roll by half a head, and multiply by the signed sine
    rotated = torch.addcmul(rotated * plan.cos, rotated.roll(head_dim // 2, -1), plan.sin)
    q, k = rotated.split((plan.num_heads, kv_heads), 1)
    if len(plan.parts) == 1:
        return _attend(q, k, v, plan.parts[0], layer)
    out = qkv.new_empty(rows, plan.num_heads * head_dim)
    for part in plan.parts:
        if part.rows is not None:
            out[part.rows] = _attend(q[part.rows], k[part.rows], v[part.rows], part, layer)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, part: ReferenceSequenceRows, layer: int) -> Tensor:
    """Writes the keys and values of one sequence's rows to the cache and returns their attention outputs: q [rows,
    heads, head_dim], k and v [rows, kv_heads, head_dim] -> [rows, heads * head_dim].

    The query heads that share keys become rows of one head, so keys and values are not expanded.
    """
    rows, kv_heads, head_dim = k.shape
    for target, new in ((part.key_targets[layer], k), (part.value_targets[layer], v)):
        if part.slots is None:
            target.copy_(new)
        else:
            target[part.slots] = new.to(target.dtype)
    folded = q.view(rows, kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, head_dim)
    keys, values = (
        part.keys[layer].to(q.dtype),
        part.values[layer].to(q.dtype),
    )  # the new keys too are read in the precision of the cache
    out = F.scaled_dot_product_attention(folded, keys, values, part.mask)
    return out.view(kv_heads, -1, rows, head_dim).permute(2, 0, 1, 3).reshape(rows, -1)


def make_slot_mover(k: Tensor, v: Tensor) -> Callable[[int, Sequence[int], int], None]:
    """Returns `move(sequence, source, start)`, which moves slot source[i] of a sequence to slot start + i, in place and
    in all layers of the KV cache `k`, `v`. `source` must be ascending, with source[i] >= start + i."""

    def move(sequence: int, source: Sequence[int], start: int) -> None:
        slots = torch.tensor(source, dtype=torch.int64, device=k.device)
        for buffer in (k, v):
            region = buffer[:, sequence]
            region[:, :, start : start + len(source)] = region.index_select(2, slots)

    return move
