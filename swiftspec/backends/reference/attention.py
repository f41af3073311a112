"""RoPE and masked attention over a KV cache. Shapes as in reference/__init__.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec.backends.reference.linear import apply_norm, rms_norm, soft_cap
from swiftspec.backends.reference.packing import ReferenceNorm
from swiftspec.model.batch import Batch
from swiftspec.model.packed_model import PLAIN_ATTENTION, AttentionOptions, KVTensors, ProjectionNorm
from swiftspec.model.spec import RopeSpec

MASK_ALIGNMENT = 8  # numbers; torch's attention kernels copy a mask whose rows do not start at a multiple of it


def rope_tables(
    rope: RopeSpec, head_dim: int, length: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Returns the RoPE tables cos and sin [length, head_dim]. The sine includes the sign of the rotation:
    x' = x * cos + roll(x, head_dim / 2) * sin. Elements that are not rotated have cos 1 and sin 0.

    Angles are computed in float32 for every model dtype, as in transformers' modeling_rope_utils. A row depends on its
    position alone, never on `length`, which includes the slots of trees.
    """
    count = rope.rotated(head_dim)
    if rope.kind == "none":
        angles = torch.zeros(length, count // 2)
    else:
        angles = torch.outer(torch.arange(length, dtype=torch.float32), _frequencies(rope, count))
    rest = (head_dim - count) // 2
    cos = F.pad(angles.cos() * rope.attention_factor, (0, rest), value=1.0).to(device, dtype)
    sin = F.pad(angles.sin() * rope.attention_factor, (0, rest)).to(device, dtype)
    return torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)


def _frequencies(rope: RopeSpec, count: int) -> Tensor:
    """Returns the frequencies [count / 2] of a head with `count` rotated elements, in radians per position."""
    exponents = torch.arange(0, count, 2, dtype=torch.float32) / count
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind in ("linear", "proportional"):
        still = int(rope.share * count // 2) if rope.kind == "proportional" else count // 2
        frequencies[still:] = 0
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3_frequencies(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, count)
    if rope.kind == "longrope":
        factors = rope.long_factors if rope.long_context else rope.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponents)
    return frequencies


def _llama3_frequencies(frequencies: Tensor, rope: RopeSpec) -> Tensor:
    """Keeps high frequencies, divides low ones by the factor, and interpolates in between."""
    wavelengths = rope.original_max_position / (2 * math.pi / frequencies)  # number of periods in the original context
    share = (wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = (1 - share) * frequencies / rope.factor + share * frequencies
    stretched = torch.where(wavelengths < rope.low_freq_factor, frequencies / rope.factor, blend)
    return torch.where(wavelengths > rope.high_freq_factor, frequencies, stretched)


def _yarn_frequencies(rope: RopeSpec, count: int) -> Tensor:
    """YaRN: keeps frequencies with more than `beta_fast` periods in the original context, divides those with fewer than
    `beta_slow` by the factor, and interpolates linearly in between (arXiv 2309.00071)."""

    def index_of(periods: float) -> float:
        return count * math.log(rope.original_max_position / (periods * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, count - 1)
    ramp = (torch.arange(count // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    kept = 1 - ramp.clamp(0, 1)
    periods = rope.theta ** (torch.arange(0, count, 2, dtype=torch.float32) / count)
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept


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
    """Inputs of attention that are the same in every layer of one kind in a forward."""

    cos: Tensor  # [rows, 1, head_dim]
    sin: Tensor  # [rows, 1, head_dim]
    num_heads: int
    parts: list[ReferenceSequenceRows]
    options: AttentionOptions = PLAIN_ATTENTION
    query_scale: Tensor | None = None  # [rows, 1, 1]


def prepare(
    batch: Batch,
    cache: KVTensors,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    options: AttentionOptions = PLAIN_ATTENTION,
) -> ReferenceAttentionPlan:
    """Prepares the attention of a forward, before its layers. `cos` and `sin` are the tables of `rope_tables`."""
    lengths = batch.kv_len.tolist()
    present = sorted(set(batch.sequence.tolist()))
    parts: list[ReferenceSequenceRows] = []
    shape = num_heads // cache.k.shape[2], cos.dtype, options.window
    for sequence in present:
        rows = None if len(present) == 1 else (batch.sequence == sequence).nonzero().squeeze(1)
        parts.append(_sequence_rows(batch, cache, sequence, rows, lengths[sequence], shape))
    return plan_of(batch, cos, sin, num_heads, parts, options)


def plan_of(
    batch: Batch,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    parts: list[ReferenceSequenceRows],
    options: AttentionOptions,
) -> ReferenceAttentionPlan:
    """Returns a plan with the values of the rows' positions from the tables."""
    cos, sin = (table.index_select(0, batch.positions).unsqueeze(1) for table in (cos, sin))
    scale = options.query_scale
    if scale is not None:
        scale = scale.index_select(0, batch.positions).to(cos.dtype).view(-1, 1, 1)
    return ReferenceAttentionPlan(cos, sin, num_heads, parts, options, scale)


def _sequence_rows(
    batch: Batch,
    cache: KVTensors,
    sequence: int,
    rows: Tensor | None,
    length: int,
    shape: tuple[int, torch.dtype, int | None],
) -> ReferenceSequenceRows:
    """`shape`: query heads that share keys, dtype of the mask, sliding window."""
    slots, window = (each if rows is None else each[rows] for each in (batch.slots, batch.mask))
    indices = slots.tolist()
    first, count = indices[0], len(indices)
    run = indices == list(range(first, first + count))
    target = slice(first, first + count) if run else slice(None)
    k, v = cache.k[:, sequence : sequence + 1], cache.v[:, sequence : sequence + 1]
    to_k, to_v = (list(part[:, 0, :, target].transpose(1, 2).unbind(0)) for part in (k, v))
    keys, values = (list(part[:, :, :, :length].unbind(0)) for part in (k, v))
    return ReferenceSequenceRows(
        rows=rows,
        slots=None if run else slots,
        key_targets=to_k,
        value_targets=to_v,
        keys=keys,
        values=values,
        mask=_mask(window, length, *shape),
    )


def _mask(window: Tensor, length: int, group: int, dtype: torch.dtype, most: int | None) -> Tensor | None:
    """Converts a bool mask [rows, window], right-aligned at `length`, to one of 0 and -inf [1, 1, group * rows,
    length]: the rows repeated for each of the `group` query heads that share keys. Returns None if all slots are
    visible. `most`: number of visible slots of a row, the last ones; None: all."""
    window = window[:, max(window.shape[1] - length, 0) :]
    if most is not None and most < length:
        window = last_visible(F.pad(window, (length - window.shape[1], 0), value=True), most)
    if window.all():
        return None
    mask = torch.zeros(window.shape[0], aligned_slots(length, window.device), dtype=dtype, device=window.device)
    mask[:, length - window.shape[1] : length].masked_fill_(~window, -math.inf)
    return mask.expand(group, -1, -1).reshape(1, 1, -1, mask.shape[1])[..., :length]


def aligned_slots(length: int, device: torch.device) -> int:
    """Returns the row stride of a mask over `length` slots: on a GPU a multiple of MASK_ALIGNMENT."""
    return length if device.type == "cpu" else -(-length // MASK_ALIGNMENT) * MASK_ALIGNMENT


def last_visible(visible: Tensor, count: int) -> Tensor:
    """Returns a bool mask [rows, slots] with only the last `count` visible slots of each row: a sliding window, since
    the visible slots of a row ascend with their positions and end with its own."""
    later = visible.flip(1).cumsum(1).flip(1)  # visible slots from this one on
    return visible & (later <= count)


def tree_attention(
    qkv: Tensor,
    plan: ReferenceAttentionPlan,
    layer: int,
    qk_norm: ReferenceNorm | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Applies RoPE, appends keys and values to the cache, and computes masked attention: qkv [rows, (heads + 2 *
    kv_heads) * head_dim] -> [rows, heads * head_dim]. With queries only (a shared KV layer), qkv [rows, heads *
    head_dim], the rows attend to the keys and values that an earlier layer has appended.

    `layer`: index of the layer in the cache. `qk_norm`: RMSNorm of queries and keys before RoPE, or after it with the
    option `norm_after_rope`, with weight [heads + kv_heads, head_dim]; with weight [heads + 2 * kv_heads, head_dim]
    also of the values. `sinks`: [heads], a logit of
    each query head that adds its exponential to the denominator of the softmax (attention sink).
    """
    rows, head_dim = qkv.shape[0], plan.cos.shape[-1]
    heads = qkv.view(rows, -1, head_dim)
    kv_heads = (heads.shape[1] - plan.num_heads) // 2
    counts = (plan.num_heads + kv_heads, kv_heads)
    rotated, v = heads.split(counts, 1)
    if qk_norm is not None and plan.options.projection_norm is not None:
        rotated = _norm_projections(rotated, qk_norm, plan.options.projection_norm, kv_heads)
    elif qk_norm is not None and qk_norm.weight.shape[0] == heads.shape[1]:
        rotated, v = rms_norm(heads, qk_norm).split(counts, 1)
    elif qk_norm is not None and not plan.options.norm_after_rope:
        rotated = rms_norm(rotated, qk_norm)
    # three operations: roll by half a head, and multiply by the signed sine
    rotated = torch.addcmul(rotated * plan.cos, rotated.roll(head_dim // 2, -1), plan.sin)
    if qk_norm is not None and plan.options.norm_after_rope:
        rotated = rms_norm(rotated, qk_norm)
    q, k = rotated.split((plan.num_heads, kv_heads), 1)
    if plan.query_scale is not None:
        q = q * plan.query_scale
    if len(plan.parts) == 1:
        return _attend(q=q, k=k, v=v, part=plan.parts[0], layer=layer, options=plan.options, sinks=sinks)
    out = qkv.new_empty(rows, plan.num_heads * head_dim)
    for part in plan.parts:
        if part.rows is not None:
            out[part.rows] = _attend(
                q=q[part.rows],
                k=k[part.rows],
                v=v[part.rows],
                part=part,
                layer=layer,
                options=plan.options,
                sinks=sinks,
            )
    return out


def _norm_projections(x: Tensor, norm: ReferenceNorm, whole: ProjectionNorm, kv_heads: int) -> Tensor:
    """Returns the RMSNorm of all query heads together and of all key heads together: x [rows, heads + kv_heads,
    head_dim]."""
    squares = x.to(norm.eps.dtype).square().sum(-1)  # [rows, heads + kv_heads]
    q, k = squares.split((x.shape[1] - kv_heads, kv_heads), 1)
    if whole.counted is not None:
        k = k.where(whole.counted, 0)
    sums = torch.stack((q.sum(1), k.sum(1)), 1)
    if whole.reduce is not None:
        sums = whole.reduce(sums)
    q_scale, k_scale = (
        (total / size + norm.eps).rsqrt_().unsqueeze(1).expand(-1, count)
        for total, size, count in zip(sums.unbind(1), (whole.q_size, whole.k_size), (q.shape[1], kv_heads), strict=True)
    )
    return apply_norm(x, torch.cat((q_scale, k_scale), 1).unsqueeze(2), norm)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    part: ReferenceSequenceRows,
    layer: int,
    options: AttentionOptions,
    sinks: Tensor | None,
) -> Tensor:
    """Writes the keys and values of one sequence's rows to the cache and returns their attention outputs: q [rows,
    heads, head_dim], k and v [rows, kv_heads, head_dim], or without heads -> [rows, heads * head_dim].

    The query heads that share keys become rows of one head, so keys and values are not expanded.
    """
    rows, _, head_dim = q.shape
    kv_heads = part.keys[layer].shape[1]
    if k.shape[1] > 0:
        _append(k, v, part, layer)
    folded = q.reshape(rows, kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, head_dim)
    keys, values = (
        part.keys[layer].to(q.dtype),
        part.values[layer].to(q.dtype),
    )  # the new keys too are read in the precision of the cache
    if options.softcap is None and sinks is None:
        out = _dot_product_attention(folded, keys, values, part.mask, options.scale)
    else:
        scores = folded @ keys.mT * (options.scale or head_dim**-0.5)
        scores = scores.to(torch.promote_types(q.dtype, torch.float32))
        if options.softcap is not None:
            scores = soft_cap(scores, options.softcap)
        if part.mask is not None:
            scores += part.mask
        if sinks is not None:  # a key without value, after the others
            scores = torch.cat((scores, sinks.view(1, kv_heads, -1, 1).repeat_interleave(rows, 2)), 3)
        out = scores.softmax(-1)[..., : keys.shape[2]].to(q.dtype) @ values
    return out.view(kv_heads, -1, rows, head_dim).permute(2, 0, 1, 3).reshape(rows, -1)


def _append(k: Tensor, v: Tensor, part: ReferenceSequenceRows, layer: int) -> None:
    """Writes keys and values [rows, kv_heads, head_dim] of one sequence's rows to the cache."""
    for target, new in ((part.key_targets[layer], k), (part.value_targets[layer], v)):
        if part.slots is None:
            target.copy_(new)
        else:
            target.index_put_((part.slots,), new.to(target.dtype))


def _dot_product_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """As F.scaled_dot_product_attention, but on a GPU the kernel depends on dtype and head dimension only: the
    memory-efficient one, or plain products if it does not support them.

    torch would choose by version, GPU and shape, so that ranks of a group could differ. It prefers cuDNN on recent
    GPUs, which compiles a plan for every new number of rows or keys. `torch.nn.attention.sdpa_kernel` restricts the
    choice for the whole process, and two threads that run models would undo each other's.
    """
    if q.device.type != "cuda":
        return F.scaled_dot_product_attention(q, keys, values, mask, scale=scale)
    aten = torch.ops.aten
    if not _has_efficient_attention(q):
        return aten._scaled_dot_product_attention_math(q, keys, values, mask, 0.0, False, scale=scale)[0]
    bias = None if mask is None else mask.expand(*q.shape[:-1], keys.shape[2])
    return aten._scaled_dot_product_efficient_attention(q, keys, values, bias, False, scale=scale)[0]


def _has_efficient_attention(q: Tensor) -> bool:
    """Returns whether torch's memory-efficient attention supports these queries [..., head_dim]: rows of a multiple of
    16 bytes, and bfloat16 since Ampere."""
    if q.dtype == torch.float64 or q.shape[-1] * q.dtype.itemsize % 16:
        return False
    return q.dtype != torch.bfloat16 or torch.cuda.get_device_capability(q.device) >= (8, 0)


def make_slot_mover(k: Tensor, v: Tensor) -> Callable[[int, Sequence[int], int], None]:
    """Returns `move(sequence, source, start)`, which moves slot source[i] of a sequence to slot start + i, in place and
    in all layers of the KV cache `k`, `v`. `source` must be ascending, with source[i] >= start + i."""

    def move(sequence: int, source: Sequence[int], start: int) -> None:
        slots = torch.tensor(source, dtype=torch.int64, device=k.device)
        for buffer in (k, v):
            region = buffer[:, sequence]
            region[:, :, start : start + len(source)] = region.index_select(2, slots)

    return move
