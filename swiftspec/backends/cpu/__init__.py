"""The fused operators on an x86-64 CPU with AVX2 or more, through the native extension.

The same functions as reference/, for bfloat16 and float32 models whose heads fit the registers (`fits`), with
bfloat16, float32 or int4 weights. Sums are float32. A row's result does not depend, to the bit, on the other rows of
its batch, on their number, or on the slots in which its keys lie.
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
from swiftspec.backends.cpu.packing import Packed, pack
from swiftspec.backends.reference import CAPTURES, PLAIN, Scores, device_tree, embed, rope_tables
from swiftspec.backends.reference.resampling import Weighed
from swiftspec.model.packed_model import Cache

if TYPE_CHECKING:
    from swiftspec.model.batch import Batch
    from swiftspec.model.config import ModelConfig

__all__ = [
    "CAPTURES",
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
    "mover",
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

level = _C.level  # the instructions in use: "avx512_bf16", "avx512", "avx2", or "none" where these operators cannot run

set_threads = _C.set_threads  # how many share large products and prompt chunks, for the process; 1 at first
threads = _C.threads
use_level = _C.use_level  # lower ones, for tests and benchmarks; False where this CPU lacks it
peak = _C.peak  # (rounds, wide) a loop of products alone: how many floating-point operations it was


def fits(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether these operators can run the model here."""
    if torch.device(device).type != "cpu" or dtype not in (torch.bfloat16, torch.float32) or level() == "none":
        return False
    return config.head_dim % 16 == 0 and config.head_dim <= 256


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm made ready at load."""

    weight: Tensor  # [D] in the model's dtype
    eps: float


def pack_norm(weight: Tensor, eps: float, dtype: torch.dtype, device: torch.device | str) -> Norm:
    """An RMSNorm's weight [D] and epsilon. It is copied: a view would keep a mapped file's pages in memory."""
    return Norm(weight.to(device, dtype, copy=True).contiguous(), eps)


def _linear(
    x: Tensor,
    packed: Packed,
    out: Tensor,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
) -> Tensor:
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    _C.linear(packed.native, x, weight, eps, residual, out, swiglu)
    return out


def norm_linear(x: Tensor, norm: Norm, packed: Packed) -> Tensor:
    """RMSNorm, then the projection (QKV): [n, D] -> [n, N]."""
    return _linear(x, packed, x.new_empty(x.shape[0], packed.outputs), norm=norm)


def norm_swiglu(x: Tensor, norm: Norm, gate_up: Packed) -> Tensor:
    """RMSNorm, gate and up projections, SiLU(gate) * up: [n, D] -> [n, N / 2]."""
    return _linear(x, gate_up, x.new_empty(x.shape[0], gate_up.outputs // 2), norm=norm, swiglu=True)


def linear_residual(
    x: Tensor, packed: Packed, residual: Tensor, reduce: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Projection, all-reduce over the ranks of a group, residual added (O, down): [n, K] and [n, D] -> [n, D]."""
    if reduce is None:
        return _linear(x, packed, torch.empty_like(residual), residual=residual)
    return reduce(_linear(x, packed, torch.empty_like(residual))).add_(residual)


def norm_head(x: Tensor, norm: Norm, packed: Packed) -> Tensor:
    """Final RMSNorm and vocabulary projection: [n, D] -> logits [n, vocab], float32, not rounded to bfloat16."""
    out = torch.empty(x.shape[0], packed.outputs, dtype=torch.float32)
    return _linear(x, packed, out, norm=norm)


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one sequence, contiguous where the kernel reads them."""

    rows: Tensor | None  # [m] int64; None: all rows of the batch
    cos: Tensor  # [m, hd]
    sin: Tensor  # [m, hd]
    slots: Tensor  # [m] int64
    mask: Tensor  # [m, W] bool, W at most `length`
    length: int
    sequence: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What attention needs and is the same in every layer."""

    parts: list[Part]
    cache: _C.Cache
    out_width: int


def prepare(batch: Batch, cache: Cache, cos: Tensor, sin: Tensor, num_heads: int) -> AttentionPlan:
    """Once per forward, before the layers. `cos` and `sin` are the tables of `rope_tables`."""
    sequences, head_dim = cache.k.shape[1], cache.k.shape[4]
    present = [0] if sequences == 1 else sorted(set(batch.sequence.tolist()))
    lengths = batch.kv_len.tolist()
    parts: list[Part] = []
    for sequence in present:
        rows = None if len(present) == 1 else (batch.sequence == sequence).nonzero().squeeze(1)
        positions, slots, mask = batch.positions, batch.slots, batch.mask
        if rows is not None:
            positions, slots, mask = positions[rows], slots[rows], mask[rows]
        length = lengths[sequence]
        parts.append(
            Part(
                rows,
                cos.index_select(0, positions),
                sin.index_select(0, positions),
                slots.contiguous(),
                mask[:, max(mask.shape[1] - length, 0) :].contiguous(),
                length,
                sequence,
            )
        )
    return AttentionPlan(parts, _C.Cache(cache.k, cache.v), num_heads * head_dim)


def tree_attention(qkv: Tensor, plan: AttentionPlan, layer: int) -> Tensor:
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


def mover(k: Tensor, v: Tensor) -> Callable[[int, Sequence[int], int], None]:
    """`move(sequence, source, start)` for a cache: in place, in all layers, slots source[i] -> start + i, where
    source [m] ascends and source[i] >= start + i."""
    return _C.Cache(k, v).move


def gumbel_rows(seed: int, stream: int, positions: Tensor, tokens: range) -> Tensor:
    """Standard Gumbel noise of absolute positions [n] (int64): [n, tokens] float32, within 1e-6 of the reference's."""
    out = torch.empty(positions.shape[0], len(tokens))
    _C.gumbel_rows(seed, stream, positions.to(torch.int32), tokens.start, out)
    return out


def draw(logits: Tensor, vocab: int, scores: Scores = PLAIN) -> Tensor:
    """The token [n] of each row's highest score, of equal ones the first; logits [n, >= vocab]. tau plays no part.

    -1 where a score is NaN, or the highest is infinite.
    """
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        return reference.draw(logits, vocab, scores)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    _C.draw(logits, vocab, scores.bias, *_noise(scores), scores.temperature, tokens)
    return tokens


def children(logits: Tensor, vocab: int, k: int, scores: Scores = PLAIN) -> tuple[Tensor, Tensor]:
    """`log_top_k` of the scores of logits [n, >= vocab]: tokens [n, k] and log-probabilities [n, k]."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        return reference.children(logits, vocab, k, scores)
    count = logits.shape[0]
    tokens, values = torch.empty(count, k, dtype=torch.int64), torch.empty(count, k)
    _C.children(logits, vocab, scores.bias, *_noise(scores), scores.temperature, scores.tau, tokens, values)
    return tokens, values


def log_probs(logits: Tensor, vocab: int, tokens: Tensor, scores: Scores = PLAIN) -> Tensor:
    """log_softmax of the scores of logits [n, >= vocab] at tokens [n]: [n]. Noise and tau play no part."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        return reference.log_probs(logits, vocab, tokens, scores)
    out = torch.empty(logits.shape[0])
    _C.log_probs(logits, vocab, scores.bias, scores.temperature, tokens.contiguous(), out)
    return out


def draw_keyed(logits: Tensor, vocab: int, keys: Tensor, scores: Scores = PLAIN) -> tuple[Tensor, Tensor]:
    """The token [n] that `draw` gives under the noise of `keys` [n] (int32, `noise.row_keys`), and `log_probs` [n]
    there, NaN where it is -1: in one pass, and without noise that cannot win."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        return reference.draw_keyed(logits, vocab, keys, scores)
    tokens, out = torch.empty(logits.shape[0], dtype=torch.int64), torch.empty(logits.shape[0])
    _C.draw_keyed(logits, vocab, scores.bias, scores.temperature, keys.contiguous(), tokens, out)
    return tokens, out


def resample(groups: Weighed, uniform: Tensor, threshold: float, width: int) -> None:
    """`reference.resampling.resample`, as a native round has it."""
    _C.resample(**groups.fields(), uniform=uniform, threshold=threshold, width=width)


def _noise(scores: Scores) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The noise and which of its rows is whose, where there are both."""
    return (None, None) if scores.noise is None or scores.rows is None else (scores.noise, scores.rows)


def log_top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of log_softmax(scores [n, V]): tokens [n, k] and log-probabilities [n, k], likeliest first, never
    above 0 and never NaN."""
    return children(scores, scores.shape[1], k)
