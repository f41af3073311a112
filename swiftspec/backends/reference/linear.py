"""Embedding, norms and projections, with what comes right before and after each. Letters as in this room's __init__."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Packed = Callable[[Tensor], Tensor]  # a projection made ready at load: [n, K] -> [n, N]
PREPACK_ROWS = 8  # oneDNN lays a weight out for this many rows; any other number is computed too


class Weight(Protocol):
    """What `pack` takes of a `swiftspec.model.weights.Weight`."""

    @property
    def bias(self) -> Tensor | None: ...
    def dequantize(self, dtype: torch.dtype) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm made ready at load."""

    weight: Tensor  # [D]
    eps: Tensor  # [] in the dtype that the variance is computed in


def pack(weight: Weight, dtype: torch.dtype, device: torch.device | str) -> Packed:
    """A checkpoint's matrix [N, K] as a dense projection; on the CPU in oneDNN's own layout if that works.

    For a few rows that takes half the time of F.linear, which lays the weight out anew on every call.
    """
    dense = weight.dequantize(dtype).to(device)
    bias = None if weight.bias is None else weight.bias.to(device, dtype)
    return _prepack(dense, bias) or (lambda x: F.linear(x, dense, bias))


def _prepack(dense: Tensor, bias: Tensor | None) -> Packed | None:
    """The projection through oneDNN; None where torch has no such operator or it gives another answer."""
    if dense.device.type != "cpu" or dense.dtype not in (torch.bfloat16, torch.float32):
        return None
    try:
        laid_out = torch.ops.mkldnn._reorder_linear_weight(dense, PREPACK_ROWS)
        linear = torch.ops.mkldnn._linear_pointwise.default

        def apply(x: Tensor) -> Tensor:
            return linear(x, laid_out, bias, "none", [], "")

        probe = torch.arange(3 * dense.shape[1], device="cpu").sin().to(dense.dtype).view(3, -1)
        got, want = apply(probe).float(), F.linear(probe, dense, bias).float()
    except (AttributeError, RuntimeError):
        return None
    close = (got - want).abs().max() <= 0.02 * want.abs().max() + 1e-6
    return apply if close else None


def pack_norm(weight: Tensor, eps: float, dtype: torch.dtype, device: torch.device | str) -> Norm:
    """An RMSNorm's weight [D] and epsilon. The variance is float32, and float64 in a float64 model."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Norm(weight.to(device, dtype), torch.tensor(eps, dtype=wide, device=device))


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
