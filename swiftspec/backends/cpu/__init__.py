"""CPU backend: fused operators for x86-64 CPUs with AVX2 or more and for aarch64, in the native extension.

It implements the functions of reference/ for bfloat16 and float32 models (`check_supported`) with bfloat16, float32,
int4 or int8 weights. Products are accumulated in float32. A row's result does not depend (bitwise) on the other rows of
its batch, on their number, or on the slots of its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends import reference
from swiftspec.backends.cpu.decoder import fuse, mlp_args, native_delta_cache
from swiftspec.backends.cpu.packing import BLOCK_OUTPUTS, PackedLinear, mask_outputs, pack, pack_mixture
from swiftspec.backends.reference import (
    DEFAULT_SCORES,
    DRAFT_HEAD,
    MAX_CAPTURED_SEQUENCES,
    PEER_ALL_REDUCE,
    PREFILL_CHUNK_ROWS,
    Scores,
    capture_bucket,
    device_tree,
    embed,
    rope_tables,
)
from swiftspec.backends.reference.per_layer import EMBEDDING_SCALE
from swiftspec.backends.reference.resampling import ResamplingState
from swiftspec.errors import UserError
from swiftspec.file_io import file_facts
from swiftspec.model.packed_model import (
    PLAIN_ATTENTION,
    AttentionOptions,
    DeltaTensors,
    KVTensors,
    PackedDelta,
    PackedMixture,
    PackedMlp,
    PackedPerLayer,
    PackedPerLayerPart,
    ProjectionNorm,
)
from swiftspec.model.spec import Activation, ModelSpec, unknown_fields

if TYPE_CHECKING:
    from swiftspec.model.batch import Batch

__all__ = [
    "DEFAULT_SCORES",
    "DRAFT_HEAD",
    "MAX_CAPTURED_SEQUENCES",
    "PEER_ALL_REDUCE",
    "PREFILL_CHUNK_ROWS",
    "Scores",
    "add_per_layer",
    "capture_bucket",
    "check_supported",
    "children",
    "device_tree",
    "draw",
    "draw_keyed",
    "embed",
    "fold_state",
    "fuse",
    "gated_delta",
    "gumbel_rows",
    "level",
    "linear_residual",
    "log_probs",
    "log_top_k",
    "machine_facts",
    "make_slot_mover",
    "mask_outputs",
    "mlp",
    "move_slots",
    "multiply_sigmoid",
    "norm_head",
    "norm_linear",
    "norm_swiglu",
    "pack",
    "pack_mixture",
    "pack_norm",
    "peak",
    "per_layer_embeddings",
    "prepare",
    "prepare_delta",
    "resample",
    "rope_tables",
    "set_threads",
    "threads",
    "tree_attention",
    "use_level",
]

MAX_HEAD_DIM = 512
FLOAT32_STREAM = True  # bfloat16 models have a residual stream in float32, with a bfloat16 cache
DELTA_HEAD_UNIT = 16  # elements
# optional fields of a spec that these operators implement
KNOWN_FIELDS = (
    "activation", "draft_head", "embedding_multiplier", "experts", "gated_delta", "logit_multiplier", "logit_softcap",
    "norm_after_rope", "norm_unit_offset", "norms", "output_gate", "output_scale", "per_layer_size", "qk_norm",
    "query_scale_beta", "residual_multiplier", "scale", "shared_intermediate_size", "shares_kv", "sigmoid", "sinks",
    "softcap", "v_norm", "window",
)  # fmt: skip

level = _C.level  # returns the ISA level in use, such as "avx512_bf16"; "none" if the CPU supports none

set_threads = _C.set_threads  # number of threads that share large products and prompt chunks; 1 by default
threads = _C.threads
use_level = _C.use_level  # selects an ISA level for tests and benchmarks; returns False if it is not supported
peak = _C.peak  # peak(rounds, float32) runs a loop of products only and returns its number of floating-point operations


def machine_facts() -> dict[str, object]:
    """Returns what decides the speed of these operators on a given CPU, serialisable as JSON: the ISA level, and
    attributes of the native extension's file that change when it is built again."""
    assert _C.__file__ is not None
    return {"level": level(), "extension": file_facts(Path(_C.__file__))}


def check_supported(spec: ModelSpec, dtype: torch.dtype, device: torch.device | str) -> None:
    """Raises UserError if these operators cannot run the model because of its dtype, its layers, the device, or the
    CPU."""
    if torch.device(device).type != "cpu":
        raise UserError(f"the CPU operators need a CPU, not {device}")
    if level() == "none":
        raise UserError("the CPU operators need x86-64 with AVX2, or aarch64")
    check_spec(spec, dtype)


def check_spec(spec: ModelSpec, dtype: torch.dtype) -> None:
    """Raises UserError if these operators cannot run the model on any CPU, because of its dtype or its layers."""
    if dtype not in (torch.bfloat16, torch.float32):
        raise UserError(f"the CPU operators compute in bfloat16 or float32, not {str(dtype).removeprefix('torch.')}")
    for head_dim in (mixer.head_dim for mixer in spec.attention_mixers):
        if head_dim % 16 or head_dim > MAX_HEAD_DIM:
            limits = f"a head dimension that is a multiple of 16 and at most {MAX_HEAD_DIM}"
            raise UserError(f"the CPU operators need {limits}, not {head_dim}")
    for delta in spec.delta_mixers:
        if delta.k_head_dim % DELTA_HEAD_UNIT or delta.v_head_dim % DELTA_HEAD_UNIT:
            sizes = f"{delta.k_head_dim} and {delta.v_head_dim}"
            raise UserError(f"the CPU operators need delta heads of a multiple of {DELTA_HEAD_UNIT}, not {sizes}")
    mixtures = {layer.mlp.intermediate_size for layer in spec.layers if layer.mlp.experts is not None}
    for size in (spec.hidden_size, *mixtures) if mixtures else ():
        if size % BLOCK_OUTPUTS:
            raise UserError(f"the CPU operators need experts whose sizes are multiples of {BLOCK_OUTPUTS}, not {size}")
    if any(layer.mlp.activation == "relu" for layer in spec.layers):
        raise UserError("the CPU operators have no ReLU")
    missing = unknown_fields(spec, KNOWN_FIELDS)
    if missing is not None:
        raise UserError(f"the CPU operators have no {missing}")


@dataclass(frozen=True, slots=True)
class CpuNorm:
    """A packed RMSNorm."""

    weight: Tensor  # [hidden] or [heads, head_dim] float32
    eps: float


def pack_norm(weight: Tensor, eps: float, dtype: torch.dtype, device: torch.device | str) -> CpuNorm:
    """Packs an RMSNorm with weight [hidden] or [heads, head_dim]. Copies it, since a view would keep the pages of a
    mapped file in memory."""
    return CpuNorm(weight.to(device, torch.float32, copy=True).contiguous(), eps)


def _linear(
    x: Tensor,
    packed: PackedLinear,
    out: Tensor,
    *,
    norm: CpuNorm | None = None,
    residual: Tensor | None = None,
    gate: Activation | Literal["none"] = "none",
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    _C.linear(packed.native, x, weight, eps, residual, out, gate, scale, softcap or 0.0)
    return out


def norm_linear(x: Tensor, norm: CpuNorm | None, packed: PackedLinear) -> Tensor:
    """Applies RMSNorm, if there is one, then a projection (QKV): x [rows, hidden] -> [rows, outputs]."""
    return _linear(x, packed, x.new_empty(x.shape[0], packed.outputs), norm=norm)


def norm_swiglu(x: Tensor, norm: CpuNorm | None, gate_up: PackedLinear, activation: Activation = "silu") -> Tensor:
    """Applies RMSNorm, if there is one, the gate and up projections and activation(gate) * up: x [rows, hidden] ->
    [rows, outputs / 2]."""
    return _linear(x, gate_up, x.new_empty(x.shape[0], gate_up.outputs // 2), norm=norm, gate=activation)


def linear_residual(
    x: Tensor,
    packed: PackedLinear,
    residual: Tensor,
    reduce: Callable[[Tensor], Tensor] | None = None,
    norm: CpuNorm | None = None,
    multiplier: float = 1.0,
) -> Tensor:
    """Applies a projection (O, down), all-reduces it over the ranks of a group with `reduce`, applies RMSNorm, if there
    is one, multiplies by `multiplier`, and adds the residual: x [rows, inputs] and residual [rows, hidden] -> [rows,
    hidden]."""
    if reduce is None and norm is None:
        return _linear(x, packed, torch.empty_like(residual), residual=residual, scale=multiplier)
    return _add_residual(_linear(x, packed, torch.empty_like(residual)), residual, reduce, norm, multiplier)


def _add_residual(
    product: Tensor,
    residual: Tensor,
    reduce: Callable[[Tensor], Tensor] | None,
    norm: CpuNorm | None,
    multiplier: float,
) -> Tensor:
    """The part of `linear_residual` after the projection, whose result is `product`."""
    if reduce is not None:
        product = reduce(product)
    if norm is None and multiplier == 1:
        return product.add_(residual)
    out, (weight, eps) = residual.clone(), (None, 0.0) if norm is None else (norm.weight, norm.eps)
    _C.norm_add(product, weight, eps, multiplier, out)
    return out


def mlp(
    hidden: Tensor,
    norm: CpuNorm | None,
    weights: PackedMlp | PackedMixture,
    residual: Tensor,
    reduce: Callable[[Tensor], Tensor] | None = None,
    output_norm: CpuNorm | None = None,
    multiplier: float = 1.0,
) -> Tensor:
    """Applies RMSNorm, the MLP down(activation(gate) * up), or the mixture of experts, the all-reduce over the ranks of
    a group with `reduce`, the norm of the output, `multiplier`, and adds the residual: hidden [rows, hidden]
    and residual [rows, hidden] -> [rows, hidden].

    Contract: a row's bits depend on its own inputs, never on the other rows, their number or their slots.
    """
    if isinstance(weights, PackedMixture):
        product, (weight, eps) = torch.empty_like(residual), (None, 0.0) if norm is None else (norm.weight, norm.eps)
        _C.mixture(mlp_args(weights), hidden, weight, eps, product)
        return _add_residual(product, residual, reduce, output_norm, multiplier)
    gated = norm_swiglu(hidden, norm, weights.gate_up, weights.activation)
    return linear_residual(gated, weights.down, residual, reduce, output_norm, multiplier)


def norm_head(
    x: Tensor, norm: CpuNorm, packed: PackedLinear, multiplier: float = 1.0, softcap: float | None = None
) -> Tensor:
    """Applies the final RMSNorm and the LM head, multiplies by `multiplier` and applies the soft cap: x [rows, hidden]
    -> logits [rows, vocab], float32, not rounded to bfloat16."""
    out = torch.empty(x.shape[0], packed.outputs, dtype=torch.float32)
    return _linear(x, packed, out, norm=norm, scale=multiplier, softcap=softcap)


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
    for rows, slots, mask, length, sequence in _sequence_rows(batch, cache.k.shape[1]):
        positions = batch.positions if rows is None else batch.positions[rows]
        scale = None if options.query_scale is None else options.query_scale.index_select(0, positions)
        tables = cos.index_select(0, positions), sin.index_select(0, positions)
        parts.append(CpuSequenceRows(rows, *tables, slots, mask, length, sequence, scale))
    return CpuAttentionPlan(parts, _C.Cache(cache.k, cache.v), num_heads * cache.k.shape[4], options)


def _sequence_rows(batch: Batch, sequences: int) -> Iterator[tuple[Tensor | None, Tensor, Tensor, int, int]]:
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


def multiply_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """Applies the output gate of attention, in place: x [rows, size] times sigmoid(gate [rows, size])."""
    _C.multiply_sigmoid(gate, x)
    return x


def per_layer_embeddings(tokens: Tensor, hidden: Tensor, weights: PackedPerLayer) -> Tensor:
    """Returns the per-layer embeddings of tokens [rows]: hidden [rows, hidden], their embeddings -> [rows, layers,
    per_layer_size]."""
    norm = weights.norm
    rows = embed(tokens, weights.table).to(hidden.dtype).mul_(weights.multiplier)
    out = rows.view(-1, len(norm.weight))
    _C.norm_add(norm_linear(hidden, None, weights.projection).view_as(out), norm.weight, norm.eps, 1.0, out)
    return out.mul_(EMBEDDING_SCALE).view(len(tokens), -1, len(norm.weight))


def add_per_layer(hidden: Tensor, embedding: Tensor, weights: PackedPerLayerPart) -> Tensor:
    """Adds RMSNorm(projection(activation(gate(hidden)) * embedding)): hidden [rows, hidden] and embedding [rows,
    per_layer_size], the layer's per-layer embeddings -> [rows, hidden]. All ranks of a group compute the same."""
    gates = norm_linear(hidden, None, weights.gate)
    _C.apply_gates(embedding, weights.activation, gates)
    return linear_residual(gates, weights.projection, hidden, None, weights.norm)


@dataclass(frozen=True, slots=True)
class CpuDeltaRows:
    """Inputs of the delta layers for the m rows of one sequence in a batch."""

    rows: Tensor | None  # [m] int64, indices of the rows in the batch; None: all rows of the batch
    slots: Tensor  # [m] int64, slots to write
    mask: Tensor  # [m, window] bool; window is at most `length`
    length: int  # slots in use
    sequence: int  # index in the cache


@dataclass(frozen=True, slots=True)
class CpuDeltaPlan:
    """Inputs of the delta layers that are the same in every layer of a forward."""

    parts: list[CpuDeltaRows]
    cache: _C.DeltaCache


def prepare_delta(batch: Batch, cache: DeltaTensors) -> CpuDeltaPlan:
    """Prepares the delta layers of a forward."""
    parts = [CpuDeltaRows(*part) for part in _sequence_rows(batch, cache.state.shape[1])]
    return CpuDeltaPlan(parts, native_delta_cache(cache))


def gated_delta(projected: Tensor, rates: Tensor, plan: CpuDeltaPlan, layer: int, weights: PackedDelta) -> Tensor:
    """Applies the convolution, the gated delta rule, the norm of each head and the gate, and writes the states of the
    rows to the cache: projected [rows, conv_size + v_size] and rates [rows, 2 * v_heads] -> [rows, v_size].

    `layer`: index of the layer in the cache. Contract: a row's bits depend on its own inputs and those of its
    ancestors, never on the other rows, their number or their slots.
    """
    tensors = weights.conv, weights.decay_factor, weights.decay_bias, weights.norm.weight, weights.norm.eps
    out = projected.new_empty(len(projected), len(weights.decay_factor) * len(weights.norm.weight))
    for part in plan.parts:
        mine = (projected, rates) if part.rows is None else (projected[part.rows], rates[part.rows])
        result = out if part.rows is None else out.new_empty(len(part.rows), out.shape[1])
        _C.gated_delta(
            *mine,
            part.slots,
            part.mask,
            plan.cache,
            layer,
            part.sequence,
            part.length,
            *tensors,
            result,
        )
        if part.rows is not None:
            out[part.rows] = result
    return out


fold_state = _C.fold_delta  # fold_state(state, keys, updates, decays); see reference
move_slots = _C.move_slots  # move_slots(buffer, sequence, slots, first); see reference


def gumbel_rows(seed: int, stream: int, positions: Tensor, tokens: range) -> Tensor:
    """Returns the standard Gumbel noise [rows, tokens] float32 of absolute positions [rows] (int64), within 1e-6 of
    reference/."""
    out = torch.empty(positions.shape[0], len(tokens))
    _C.gumbel_rows(seed, stream, positions.to(torch.int32), tokens.start, out)
    return out


def draw(logits: Tensor, vocab: int, scores: Scores = DEFAULT_SCORES) -> Tensor:
    """Returns the token [rows] with the highest score per row, the first one of ties; logits [rows, >= vocab]. tau is
    ignored. The token is -1 if a score of the row is NaN or the highest is infinite."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        return reference.draw(logits, vocab, scores)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    scores = _with_numbers(scores)
    _C.draw(logits, vocab, scores.bias, *_noise(scores), scores.temperature, tokens)
    return tokens


def children(logits: Tensor, vocab: int, k: int, scores: Scores = DEFAULT_SCORES) -> tuple[Tensor, Tensor]:
    """Returns `log_top_k` of the scores of logits [rows, >= vocab]: tokens and log-probabilities, each [rows, k]."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        return reference.children(logits, vocab, k, scores)
    count = logits.shape[0]
    tokens, values = torch.empty(count, k, dtype=torch.int64), torch.empty(count, k)
    scores = _with_numbers(scores)
    _C.children(logits, vocab, scores.bias, *_noise(scores), scores.temperature, scores.tau, tokens, values)
    return tokens, values


def log_probs(logits: Tensor, vocab: int, tokens: Tensor, scores: Scores = DEFAULT_SCORES) -> Tensor:
    """Returns the log-probabilities [rows] of `tokens` [rows] under softmax((logits + bias) / temperature).

    `scores`: bias and temperature; its noise and calibration are ignored. Logits: [rows, >= vocab].
    """
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        return reference.log_probs(logits, vocab, tokens, scores)
    out = torch.empty(logits.shape[0])
    _C.log_probs(logits, vocab, scores.bias, scores.temperature, tokens.contiguous(), out)
    return out


def draw_keyed(logits: Tensor, vocab: int, keys: Tensor, scores: Scores = DEFAULT_SCORES) -> tuple[Tensor, Tensor]:
    """Draws a token per row of logits [rows, >= vocab] with the Gumbel noise of `keys` [rows] (int32, see
    `noise.row_keys`). Returns the tokens [rows], -1 as in `draw`, and their log-probabilities [rows] without the noise,
    NaN if the token is -1. Skips the noise of tokens that cannot have the highest score."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        return reference.draw_keyed(logits, vocab, keys, scores)
    tokens, out = torch.empty(logits.shape[0], dtype=torch.int64), torch.empty(logits.shape[0])
    _C.draw_keyed(logits, vocab, scores.bias, scores.temperature, keys.contiguous(), tokens, out)
    return tokens, out


def resample(groups: ResamplingState, uniform: Tensor, threshold: float, width: int) -> None:
    """Native version of `reference.resampling.resample`."""
    _C.resample(**groups.fields(), uniform=uniform, threshold=threshold, width=width)


def _with_numbers(scores: Scores) -> Scores:
    """Returns the same scores with `Scores.scalars` as Python numbers."""
    if scores.scalars is None:
        return scores
    temperature, tau, factor = scores.scalars.tolist()
    noise, rows = (scores.noise, scores.rows) if factor else (None, None)
    return Scores(temperature, scores.bias, noise, rows, tau)


def _noise(scores: Scores) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Returns the noise and the noise row of each row of logits, or (None, None) if the scores have no noise."""
    return (None, None) if scores.noise is None or scores.rows is None else (scores.noise, scores.rows)


def log_top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k largest of log_softmax(scores): tokens [rows, k] and log-probabilities [rows, k], most likely
    first; scores [rows, vocab]. Log-probabilities are at most 0 and never NaN."""
    return children(scores, scores.shape[1], k)
