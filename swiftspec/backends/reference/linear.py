"""Embedding, norms and projections, with what comes right before and after each. Letters as in this room's __init__."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec.backends.reference.packing import Norm, Packed


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """tokens [n], weight [vocab, D] -> [n, D]."""
    return weight.index_select(0, tokens)


def _normalise(x: Tensor, norm: Norm) -> Tensor:
    """RMSNorm of [n, D]: rounded to the model's dtype before the weight is applied, as transformers does.

    By way of the vector norm: F.rms_norm and a mean of squares take 1.3 to 2 times as long on the CPU.
    """
    length = torch.linalg.vector_norm(x, 2, -1, True, dtype=norm.eps.dtype)
    scale = torch.addcmul(norm.eps, length, length, value=1 / x.shape[-1]).rsqrt_()
    # `out` rounds the product, which is computed in the dtype of `scale`: one operator less than a cast
    return torch.mul(x, scale, out=torch.empty_like(x)).mul_(norm.weight)


def norm_linear(x: Tensor, norm: Norm, packed: Packed) -> Tensor:
    """RMSNorm, then the projection (QKV): [n, D] -> [n, N]."""
    return packed(_normalise(x, norm))


def norm_swiglu(x: Tensor, norm: Norm, gate_up: Packed) -> Tensor:
    """RMSNorm, gate and up projections, SiLU(gate) * up: [n, D] -> [n, N / 2]."""
    gate, up = gate_up(_normalise(x, norm)).chunk(2, -1)
    return F.silu(gate).mul_(up)


def linear_residual(
    x: Tensor, packed: Packed, residual: Tensor, reduce: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Projection, all-reduce over a group's ranks, residual added (O, down): [n, K] and [n, D] -> [n, D]."""
    product = packed(x)
    if reduce is not None:
        product = reduce(product)
    return product.add_(residual)


def norm_head(x: Tensor, norm: Norm, packed: Packed) -> Tensor:
    """Final RMSNorm and projection: [n, D] -> logits [n, vocab], float32, or float64 in a float64 model."""
    return packed(_normalise(x, norm)).to(norm.eps.dtype)
