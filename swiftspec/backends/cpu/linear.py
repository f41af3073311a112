"""Embedding, norms, projections and MLPs of the CPU backend. Shapes as in reference/__init__.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cpu.decoder import mlp_args
from swiftspec.backends.cpu.packing import PackedLinear
from swiftspec.backends.reference.linear import embed
from swiftspec.backends.reference.per_layer import EMBEDDING_SCALE
from swiftspec.model.packed_model import PackedMixture, PackedMlp, PackedPerLayer, PackedPerLayerPart
from swiftspec.model.spec import Activation


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
    _C.linear(
        packed.native,
        x,
        None if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        residual,
        out,
        gate=gate,
        scale=scale,
        softcap=softcap or 0.0,
    )
    return out


def norm_linear(x: Tensor, norm: CpuNorm | None, packed: PackedLinear) -> Tensor:
    """RMSNorm and a projection; see reference/linear.py."""
    return _linear(x, packed, x.new_empty(x.shape[0], packed.outputs), norm=norm)


def norm_swiglu(x: Tensor, norm: CpuNorm | None, gate_up: PackedLinear, activation: Activation = "silu") -> Tensor:
    """RMSNorm, gate and up projections, and the activation; see reference/linear.py."""
    return _linear(x, gate_up, x.new_empty(x.shape[0], gate_up.outputs // 2), norm=norm, gate=activation)


def linear_residual(
    x: Tensor,
    packed: PackedLinear,
    residual: Tensor,
    reduce: Callable[[Tensor], Tensor] | None = None,
    norm: CpuNorm | None = None,
    multiplier: float = 1.0,
) -> Tensor:
    """A projection, its all-reduce and the residual; see reference/linear.py."""
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
    """RMSNorm and a gated MLP or a mixture of experts; see reference/mixture.py."""
    if isinstance(weights, PackedMixture):
        product, (weight, eps) = torch.empty_like(residual), (None, 0.0) if norm is None else (norm.weight, norm.eps)
        _C.mixture(mlp_args(weights), hidden, weight, eps, product)
        return _add_residual(product, residual, reduce, output_norm, multiplier)
    gated = norm_swiglu(hidden, norm, weights.gate_up, weights.activation)
    return linear_residual(gated, weights.down, residual, reduce, output_norm, multiplier)


def norm_head(
    x: Tensor, norm: CpuNorm, packed: PackedLinear, multiplier: float = 1.0, softcap: float | None = None
) -> Tensor:
    """Final RMSNorm and LM head; see reference/linear.py. The logits are float32, not rounded to bfloat16."""
    out = torch.empty(x.shape[0], packed.outputs, dtype=torch.float32)
    return _linear(x, packed, out, norm=norm, scale=multiplier, softcap=softcap)


def per_layer_embeddings(tokens: Tensor, hidden: Tensor, weights: PackedPerLayer) -> Tensor:
    """Per-layer embeddings of tokens; see reference/per_layer.py."""
    norm = weights.norm
    rows = embed(tokens, weights.table).to(hidden.dtype).mul_(weights.multiplier)
    out = rows.view(-1, len(norm.weight))
    _C.norm_add(norm_linear(hidden, None, weights.projection).view_as(out), norm.weight, norm.eps, 1.0, out)
    return out.mul_(EMBEDDING_SCALE).view(len(tokens), -1, len(norm.weight))


def add_per_layer(hidden: Tensor, embedding: Tensor, weights: PackedPerLayerPart) -> Tensor:
    """Adds the per-layer embeddings of a layer; see reference/per_layer.py."""
    gates = norm_linear(hidden, None, weights.gate)
    _C.apply_gates(embedding, weights.activation, gates)
    return linear_residual(gates, weights.projection, hidden, None, weights.norm)
