"""CPU backend: fused operators for x86-64 CPUs with AVX2 or more, in the native extension.

It implements the functions of reference/ for bfloat16 and float32 models (`fits`) with bfloat16, float32, int4 or int8
weights. Sums are float32. A row's result does not depend (bitwise) on the other rows of its batch, on their number, or
on the slots of its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends import reference
from swiftspec.backends.cpu.decoder import fuse
from swiftspec.backends.cpu.packing import PackedLinear, pack
from swiftspec.backends.reference import DEFAULT_SCORES, MAX_CAPTURED_SEQUENCES, Scores, device_tree, embed, rope_tables
from swiftspec.backends.reference.resampling import ResamplingState
from swiftspec.model.packed_model import Cache

if TYPE_CHECKING:
    from swiftspec.model.batch import Batch
    from swiftspec.model.config import ModelConfig

__all__ = [
    "MAX_CAPTURED_SEQUENCES",
    "Scores",
    "children",
    "device_tree",
    "draw",
    "draw_keyed",
    "embed",
    "fits",
    "fuse",
    "gumbel_rows",
    "level",
    "linear_residual",
    "log_probs",
    "log_top_k",
    "make_slot_mover",
    "norm_head",
    "norm_linear",
    "norm_swiglu",
    "pack",
    "pack_norm",
    "peak",
    "prepare",
    "resample",
    "rope_tables",
    "set_threads",
    "threads",
    "tree_attention",
    "use_level",
]

level = _C.level  # the ISA level in use, such as "avx512_bf16" or "avx2"; "none" if the CPU lacks AVX2

set_threads = _C.set_threads  # threads of the process that share large products and prompt chunks; 1 by default
threads = _C.threads
use_level = _C.use_level  # selects an ISA level for tests and benchmarks; returns False if it is not supported
peak = _C.peak  # (rounds, float32): runs a loop of products only, returns its floating-point operations


def fits(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether this backend supports a model and device."""
    if torch.device(device).type != "cpu" or dtype not in (torch.bfloat16, torch.float32) or level() == "none":
        return False
    return config.head_dim % 16 == 0 and config.head_dim <= 256


@dataclass(frozen=True, slots=True)
class CpuNorm:
    """A packed RMSNorm."""

    weight: Tensor  # [D] in the model's dtype
    eps: float


def pack_norm(weight: Tensor, eps: float, dtype: torch.dtype, device: torch.device | str) -> CpuNorm:
    """Packs an RMSNorm: weight [D] and epsilon. Copies, since a view would keep a mapped file's pages in memory."""
    return CpuNorm(weight.to(device, dtype, copy=True).contiguous(), eps)


def _linear(
    x: Tensor,
    packed: PackedLinear,
    out: Tensor,
    *,
    norm: CpuNorm | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
) -> Tensor:
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    _C.linear(packed.native, x, weight, eps, residual, out, swiglu)
    return out


def norm_linear(x: Tensor, norm: CpuNorm, packed: PackedLinear) -> Tensor:
    """RMSNorm, then the projection (QKV): [n, D] -> [n, N]."""
    return _linear(x, packed, x.new_empty(x.shape[0], packed.outputs), norm=norm)


def norm_swiglu(x: Tensor, norm: CpuNorm, gate_up: PackedLinear) -> Tensor:
    """RMSNorm, gate and up projections, SiLU(gate) * up: [n, D] -> [n, N / 2]."""
    return _linear(x, gate_up, x.new_empty(x.shape[0], gate_up.outputs // 2), norm=norm, swiglu=True)


def linear_residual(
    x: Tensor, packed: PackedLinear, residual: Tensor, reduce: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Projection, all-reduce over the ranks of a group, plus residual (O, down): [n, K] and [n, D] -> [n, D]."""
    if reduce is None:
        return _linear(x, packed, torch.empty_like(residual), residual=residual)
    return reduce(_linear(x, packed, torch.empty_like(residual))).add_(residual)


def norm_head(x: Tensor, norm: CpuNorm, packed: PackedLinear) -> Tensor:
    """Final RMSNorm and vocabulary projection: [n, D] -> logits [n, vocab], float32, not rounded to bfloat16."""
    out = torch.empty(x.shape[0], packed.outputs, dtype=torch.float32)
    return _linear(x, packed, out, norm=norm)


@dataclass(frozen=True, slots=True)
class CpuSequenceRows:
    """The rows of one sequence in a batch."""

    rows: Tensor | None  # [m] int64; None: all rows of the batch
    cos: Tensor  # [m, hd]
    sin: Tensor  # [m, hd]
    slots: Tensor  # [m] int64
    mask: Tensor  # [m, W] bool, W at most `length`
    length: int
    sequence: int


@dataclass(frozen=True, slots=True)
class CpuAttentionPlan:
    """Inputs of attention that are the same in every layer."""

    parts: list[CpuSequenceRows]
    cache: _C.Cache
    out_width: int


def prepare(batch: Batch, cache: Cache, cos: Tensor, sin: Tensor, num_heads: int) -> CpuAttentionPlan:
    """Prepares attention, once per forward. `cos` and `sin` are the tables of `rope_tables`."""
    sequences, head_dim = cache.k.shape[1], cache.k.shape[4]
    present = [0] if sequences == 1 else sorted(set(batch.sequence.tolist()))
    lengths = batch.kv_len.tolist()
    parts: list[CpuSequenceRows] = []
    for sequence in present:
        rows = None if len(present) == 1 else (batch.sequence == sequence).nonzero().squeeze(1)
        positions, slots, mask = batch.positions, batch.slots, batch.mask
        if rows is not None:
            positions, slots, mask = positions[rows], slots[rows], mask[rows]
        length = lengths[sequence]
        parts.append(
            CpuSequenceRows(
                rows,
                cos.index_select(0, positions),
                sin.index_select(0, positions),
                slots.contiguous(),
                mask[:, max(mask.shape[1] - length, 0) :].contiguous(),
                length,
                sequence,
            )
        )
    return CpuAttentionPlan(parts, _C.Cache(cache.k, cache.v), num_heads * head_dim)


def tree_attention(qkv: Tensor, plan: CpuAttentionPlan, layer: int) -> Tensor:
    """RoPE, KV append, masked attention: qkv [n, (H + 2G) hd] -> [n, H hd]."""
    out = qkv.new_empty(qkv.shape[0], plan.out_width)
    for part in plan.parts:
        mine = qkv if part.rows is None else qkv[part.rows]
        result = out if part.rows is None else out.new_empty(mine.shape[0], out.shape[1])
        _C.attention(
            mine, part.cos, part.sin, part.slots, part.mask, plan.cache, layer, part.sequence, part.length, result
        )
        if part.rows is not None:
            out[part.rows] = result
    return out


def make_slot_mover(k: Tensor, v: Tensor) -> Callable[[int, Sequence[int], int], None]:
    """Returns `move(sequence, source, start)`, which moves slots source[i] to start + i in place, in all layers of a
    cache. `source` [m] must ascend, with source[i] >= start + i."""
    return _C.Cache(k, v).move


def gumbel_rows(seed: int, stream: int, positions: Tensor, tokens: range) -> Tensor:
    """Standard Gumbel noise of absolute positions [n] (int64): [n, tokens] float32, within 1e-6 of reference/."""
    out = torch.empty(positions.shape[0], len(tokens))
    _C.gumbel_rows(seed, stream, positions.to(torch.int32), tokens.start, out)
    return out


def draw(logits: Tensor, vocab: int, scores: Scores = DEFAULT_SCORES) -> Tensor:
    """The token [n] of each row's highest score (the first of equal ones); logits [n, >= vocab]. tau is ignored.

    -1 if a score is NaN or the highest is infinite.
    """
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        return reference.draw(logits, vocab, scores)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    _C.draw(logits, vocab, scores.bias, *_noise(scores), scores.temperature, tokens)
    return tokens


def children(logits: Tensor, vocab: int, k: int, scores: Scores = DEFAULT_SCORES) -> tuple[Tensor, Tensor]:
    """`log_top_k` of the scores of logits [n, >= vocab]: tokens [n, k] and log-probabilities [n, k]."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        return reference.children(logits, vocab, k, scores)
    count = logits.shape[0]
    tokens, values = torch.empty(count, k, dtype=torch.int64), torch.empty(count, k)
    _C.children(logits, vocab, scores.bias, *_noise(scores), scores.temperature, scores.tau, tokens, values)
    return tokens, values


def log_probs(logits: Tensor, vocab: int, tokens: Tensor, scores: Scores = DEFAULT_SCORES) -> Tensor:
    """log_softmax of the scores of logits [n, >= vocab] at tokens [n]: [n]. Noise and tau are ignored."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        return reference.log_probs(logits, vocab, tokens, scores)
    out = torch.empty(logits.shape[0])
    _C.log_probs(logits, vocab, scores.bias, scores.temperature, tokens.contiguous(), out)
    return out


def draw_keyed(logits: Tensor, vocab: int, keys: Tensor, scores: Scores = DEFAULT_SCORES) -> tuple[Tensor, Tensor]:
    """Fused `draw` and `log_probs`: the token [n] drawn with the noise of `keys` [n] (int32, `noise.row_keys`), and its
    log-probability [n], NaN if the token is -1. Skips the noise of tokens that cannot win."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        return reference.draw_keyed(logits, vocab, keys, scores)
    tokens, out = torch.empty(logits.shape[0], dtype=torch.int64), torch.empty(logits.shape[0])
    _C.draw_keyed(logits, vocab, scores.bias, scores.temperature, keys.contiguous(), tokens, out)
    return tokens, out


def resample(groups: ResamplingState, uniform: Tensor, threshold: float, width: int) -> None:
    """`reference.resampling.resample` as a native operator."""
    _C.resample(**groups.fields(), uniform=uniform, threshold=threshold, width=width)


def _noise(scores: Scores) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Noise and the noise row of each row of logits, or (None, None)."""
    return (None, None) if scores.noise is None or scores.rows is None else (scores.noise, scores.rows)


def log_top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of log_softmax(scores [n, V]): tokens [n, k] and log-probabilities [n, k], likeliest first, never
    above 0 or NaN."""
    return children(scores, scores.shape[1], k)
