"""The fused operators on a CPU with AVX-512 BF16, through the native extension: bfloat16 in and out, float32 sums.

The same functions as reference.py, for bfloat16 models whose sizes fit the registers (`fits`). One thread: a round of a
small model is over before a second one has woken up. A row's result does not depend on the other rows of its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.ops import reference
from swiftspec.ops.reference import Cache, Weight, embed, rope_tables

if TYPE_CHECKING:
    from swiftspec.batch import Batch
    from swiftspec.config import ModelConfig

__all__ = [
    "embed",
    "fits",
    "linear_residual",
    "log_top_k",
    "move_kv",
    "norm_head",
    "norm_linear",
    "norm_swiglu",
    "pack",
    "pack_norm",
    "prepare",
    "rope_tables",
    "tree_attention",
]


def fits(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether these operators can run the model here."""
    if torch.device(device).type != "cpu" or dtype != torch.bfloat16 or not _C.has_bf16():
        return False
    inputs = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    heads = config.head_dim % 32 == 0 and config.head_dim <= 256 and config.num_heads // config.num_kv_heads <= 16
    return heads and all(size % 16 == 0 for size in inputs)


@dataclass(frozen=True, slots=True)
class Packed:
    """A projection made ready at load."""

    weight: Tensor  # [ceil(N / 16), K / 2, 16, 2] bfloat16
    bias: Tensor | None  # [N padded to 16] float32
    inputs: int
    outputs: int  # N; the blocks may hold zero rows beyond it

    @property
    def padded(self) -> int:
        return self.weight.shape[0] * 16


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm made ready at load."""

    weight: Tensor  # [D] bfloat16
    eps: float


def pack(weight: Weight, dtype: torch.dtype, device: torch.device | str) -> Packed:
    """A checkpoint's matrix [N, K], dense, in blocks of 16 outputs by 2 inputs: what one instruction takes."""
    dense = weight.dequantize(dtype).to(device)
    outputs, inputs = dense.shape
    blocks = -(-outputs // 16)
    rows = torch.nn.functional.pad(dense, (0, 0, 0, blocks * 16 - outputs))
    packed = rows.view(blocks, 16, inputs // 2, 2).transpose(1, 2).contiguous()
    bias = None
    if weight.bias is not None:
        bias = torch.nn.functional.pad(weight.bias.float(), (0, blocks * 16 - outputs)).contiguous()
    return Packed(packed, bias, inputs, outputs)


def pack_norm(weight: Tensor, eps: float, dtype: torch.dtype, device: torch.device | str) -> Norm:
    """An RMSNorm's weight [D] and epsilon."""
    return Norm(weight.to(device, dtype).contiguous(), eps)


def _linear(
    x: Tensor,
    packed: Packed,
    out: Tensor,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
) -> Tensor:
    """One native call. Whoever calls has made `x` contiguous and `out` as wide as the blocks."""
    assert x.is_contiguous() and x.shape[1] == packed.inputs
    logits = out.dtype == torch.float32
    _C.linear(
        x.data_ptr(),
        0 if norm is None else norm.weight.data_ptr(),
        0.0 if norm is None else norm.eps,
        packed.weight.data_ptr(),
        0 if packed.bias is None else packed.bias.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        0 if logits else out.data_ptr(),
        out.data_ptr() if logits else 0,
        swiglu,
        x.shape[0],
        packed.inputs,
        packed.padded,
    )
    return out


def norm_linear(x: Tensor, norm: Norm, packed: Packed) -> Tensor:
    """RMSNorm, then the projection (QKV): [n, D] -> [n, N]."""
    return _linear(x, packed, x.new_empty(x.shape[0], packed.padded), norm=norm)


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
    """Final RMSNorm and vocabulary projection: [n, D] -> logits [n, vocab], float32 and not rounded to bfloat16."""
    out = torch.empty(x.shape[0], packed.padded, dtype=torch.float32)
    return _linear(x, packed, out, norm=norm)[:, : packed.outputs]


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one sequence, contiguous where the kernel reads them."""

    rows: Tensor | None  # [m] int64; None: all rows of the batch
    cos: Tensor  # [m, hd]
    sin: Tensor  # [m, hd]
    slots: Tensor  # [m] int64
    mask: Tensor  # [m, W] bool, W at most `length`
    length: int
    keys: int  # address of the sequence's region in layer 0
    values: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What attention needs and is the same in every layer."""

    parts: list[Part]
    num_heads: int
    kv_heads: int
    capacity: int
    head_dim: int
    stride: int  # bytes from one layer's region to the next


def prepare(batch: Batch, cache: Cache, cos: Tensor, sin: Tensor, num_heads: int) -> AttentionPlan:
    """Once per forward, before the layers. `cos` and `sin` are the tables of `rope_tables`."""
    assert cache.k.is_contiguous() and cache.v.is_contiguous() and cache.k.dtype == torch.bfloat16
    _, sequences, kv_heads, capacity, head_dim = cache.k.shape
    region = kv_heads * capacity * head_dim * cache.k.element_size()
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
                cache.k.data_ptr() + sequence * region,
                cache.v.data_ptr() + sequence * region,
            )
        )
    return AttentionPlan(parts, num_heads, kv_heads, capacity, head_dim, sequences * region)


def tree_attention(qkv: Tensor, plan: AttentionPlan, layer: int) -> Tensor:
    """RoPE, KV append, masked attention: qkv [n, (H + 2G) hd] -> [n, H hd]."""
    out = qkv.new_empty(qkv.shape[0], plan.num_heads * plan.head_dim)
    for part in plan.parts:
        mine = qkv if part.rows is None else qkv[part.rows]
        result = out if part.rows is None else out.new_empty(mine.shape[0], out.shape[1])
        _C.attention(
            mine.data_ptr(),
            part.cos.data_ptr(),
            part.sin.data_ptr(),
            part.slots.data_ptr(),
            part.mask.data_ptr(),
            part.keys + layer * plan.stride,
            part.values + layer * plan.stride,
            result.data_ptr(),
            mine.shape[0],
            plan.num_heads,
            plan.kv_heads,
            plan.capacity,
            part.length,
            part.mask.shape[1],
            plan.head_dim,
        )
        if part.rows is not None:
            out[part.rows] = result
    return out


def move_kv(k: Tensor, v: Tensor, sequence: int, source: Tensor, start: int) -> None:
    """In place, in all layers: slots source[i] -> start + i, where source [m] ascends and source[i] >= start + i."""
    layers, sequences, kv_heads, capacity, head_dim = k.shape
    assert k.is_contiguous() and v.is_contiguous()
    slot = head_dim * k.element_size()
    region = kv_heads * capacity * slot
    for buffer in (k, v):
        _C.move_kv(
            buffer.data_ptr() + sequence * region,
            sequences * region,
            layers,
            kv_heads,
            capacity,
            slot,
            source.data_ptr(),
            source.shape[0],
            start,
        )


def log_top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of log_softmax(scores [n, V]): tokens [n, k] and log-probabilities [n, k], likeliest first, never
    above 0 and never NaN."""
    if scores.dtype != torch.float32:
        return reference.log_top_k(scores, k)
    scores = scores.contiguous()
    rows, vocab = scores.shape
    tokens = torch.empty(rows, k, dtype=torch.int64)
    values = torch.empty(rows, k)
    _C.log_top_k(scores.data_ptr(), rows, vocab, k, tokens.data_ptr(), values.data_ptr())
    return tokens, values
