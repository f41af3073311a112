"""Rotary positions and masked attention over a cache. Letters as in this room's __init__."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec.model.batch import Batch
from swiftspec.model.config import RopeConfig
from swiftspec.model.packed_model import Cache


def rope_tables(
    rope: RopeConfig, head_dim: int, length: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """cos and sin [length, hd]; sin has the half rotation's sign, so that x' = x cos + roll(x, hd/2) sin.

    Angles are float32 whatever the model's dtype, as in transformers' modeling_rope_utils.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = _stretch(1.0 / (rope.theta**exponents), rope)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    cos, sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    return torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)


def _stretch(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Context extension. "llama3" leaves short waves, divides long ones by the factor, blends in between."""
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    turns = rope.original_max_position / (2 * math.pi / frequencies)  # within the length the model was trained at
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = (1 - share) * frequencies / rope.factor + share * frequencies
    stretched = torch.where(turns < rope.low_freq_factor, frequencies / rope.factor, blend)
    return torch.where(turns > rope.high_freq_factor, frequencies, stretched)


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one sequence. The lists hold one view of the cache for each layer."""

    rows: Tensor | None  # [m] int64; None: all rows of the batch
    slots: Tensor | None  # [m] int64; None: they follow each other, and the targets below are just them
    key_targets: list[Tensor]  # [m, G, hd], or with slots [capacity, G, hd]
    value_targets: list[Tensor]
    keys: list[Tensor]  # [1, G, L, hd]
    values: list[Tensor]
    mask: Tensor | None  # [1, 1, g * m, L], added to the scores; None: nothing is hidden


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What attention needs and is the same in every layer."""

    cos: Tensor  # [n, 1, hd]
    sin: Tensor  # [n, 1, hd]
    num_heads: int
    parts: list[Part]


def prepare(batch: Batch, cache: Cache, cos: Tensor, sin: Tensor, num_heads: int) -> AttentionPlan:
    """Once per forward, before the layers. `cos` and `sin` are the tables of `rope_tables`."""
    here, lengths = batch.sequence.tolist(), batch.kv_len.tolist()
    present = sorted(set(here))
    parts: list[Part] = []
    for sequence in present:
        rows = None if len(present) == 1 else (batch.sequence == sequence).nonzero().squeeze(1)
        parts.append(_part(batch, cache, sequence, rows, lengths[sequence], num_heads, cos.dtype))
    cos, sin = cos.index_select(0, batch.positions), sin.index_select(0, batch.positions)
    return AttentionPlan(cos.unsqueeze(1), sin.unsqueeze(1), num_heads, parts)


def _part(
    batch: Batch, cache: Cache, sequence: int, rows: Tensor | None, length: int, num_heads: int, dtype: torch.dtype
) -> Part:
    slots, window = (each if rows is None else each[rows] for each in (batch.slots, batch.mask))
    places = slots.tolist()
    first, count = places[0], len(places)
    run = places == list(range(first, first + count))
    target = slice(first, first + count) if run else slice(None)
    k, v = cache.k[:, sequence : sequence + 1], cache.v[:, sequence : sequence + 1]
    to_k, to_v = (list(part[:, 0, :, target].transpose(1, 2).unbind(0)) for part in (k, v))
    keys, values = (list(part[:, :, :, :length].unbind(0)) for part in (k, v))
    mask = _mask(window, length, num_heads // cache.k.shape[2], dtype)
    return Part(rows, None if run else slots, to_k, to_v, keys, values, mask)


def _mask(window: Tensor, length: int, group: int, dtype: torch.dtype) -> Tensor | None:
    """[m, W] bool, right-aligned at `length` -> [1, 1, g * m, L] of 0 and -inf, head by head."""
    window = window[:, max(window.shape[1] - length, 0) :]
    if window.all():
        return None
    mask = torch.zeros(window.shape[0], length, dtype=dtype, device=window.device)
    mask[:, length - window.shape[1] :].masked_fill_(~window, -math.inf)
    return mask.expand(group, -1, -1).reshape(1, 1, -1, length)


def tree_attention(qkv: Tensor, plan: AttentionPlan, layer: int) -> Tensor:
    """RoPE, KV append, masked attention: qkv [n, (H + 2G) hd] -> [n, H hd]."""
    rows, head_dim = qkv.shape[0], plan.cos.shape[-1]
    heads = qkv.view(rows, -1, head_dim)
    kv_heads = (heads.shape[1] - plan.num_heads) // 2
    turned, v = heads.split((plan.num_heads + kv_heads, kv_heads), 1)
    # roll and the signed sine are half rotation in three operations
    turned = torch.addcmul(turned * plan.cos, turned.roll(head_dim // 2, -1), plan.sin)
    q, k = turned.split((plan.num_heads, kv_heads), 1)
    if len(plan.parts) == 1:
        return _attend(q, k, v, plan.parts[0], layer)
    out = qkv.new_empty(rows, plan.num_heads * head_dim)
    for part in plan.parts:
        if part.rows is not None:
            out[part.rows] = _attend(q[part.rows], k[part.rows], v[part.rows], part, layer)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, part: Part, layer: int) -> Tensor:
    """One sequence: q [m, H, hd], k and v [m, G, hd] -> [m, H hd].

    The g heads that share keys become rows of one attention head, so keys and values are never expanded.
    """
    rows, kv_heads, head_dim = k.shape
    for target, new in ((part.key_targets[layer], k), (part.value_targets[layer], v)):
        if part.slots is None:
            target.copy_(new)
        else:
            target[part.slots] = new.to(target.dtype)
    folded = q.view(rows, kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, head_dim)
    keys, values = part.keys[layer].to(q.dtype), part.values[layer].to(q.dtype)  # new ones, too, as the cache has them
    out = F.scaled_dot_product_attention(folded, keys, values, part.mask)
    return out.view(kv_heads, -1, rows, head_dim).permute(2, 0, 1, 3).reshape(rows, -1)


def mover(k: Tensor, v: Tensor) -> Callable[[int, Sequence[int], int], None]:
    """`move(sequence, source, start)` for a cache: in place, in all layers, slots source[i] -> start + i, where
    source [m] ascends and source[i] >= start + i."""

    def move(sequence: int, source: Sequence[int], start: int) -> None:
        slots = torch.tensor(source, dtype=torch.int64, device=k.device)
        for buffer in (k, v):
            region = buffer[:, sequence]
            region[:, :, start : start + len(source)] = region.index_select(2, slots)

    return move
