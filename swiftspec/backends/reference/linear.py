"""Embedding, norms and projections with their prologues and epilogues. Shapes as in reference/__init__.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec.backends.reference.packing import LinearFn, ReferenceNorm
from swiftspec.model.spec import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation


def embed(tokens: Tensor, weight: Tensor, multiplier: float = 1.0) -> Tensor:
    """Embedding lookup, times `multiplier`: tokens [rows], weight [vocab, hidden] -> [rows, hidden]."""
    rows = weight.index_select(0, tokens)
    return rows if multiplier == 1 else rows.mul_(multiplier)


def rms_norm(x: Tensor, norm: ReferenceNorm) -> Tensor:
    """Returns the RMSNorm of x over its last dimension, rounded to the model's dtype before the weight is applied, as
    transformers does.

    Uses the vector norm, since F.rms_norm and a mean of squares take 1.3 to 2 times as long on the CPU.
    """
    length = torch.linalg.vector_norm(x, 2, -1, True, dtype=norm.eps.dtype)
    scale = torch.addcmul(norm.eps, length, length, value=1 / x.shape[-1]).rsqrt_()
    return apply_norm(x, scale, norm)


def apply_norm(x: Tensor, scale: Tensor, norm: ReferenceNorm) -> Tensor:
    """Returns x times `scale`, rounded to the dtype of x, times the weight of `norm`."""
    # the product is computed in the dtype of `scale` and rounded by `out`, which saves a cast
    return torch.mul(x, scale, out=torch.empty_like(x)).mul_(norm.weight)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Returns cap * tanh(x / cap), in place."""
    return x.div_(cap).tanh_().mul_(cap)


def norm_linear(x: Tensor, norm: ReferenceNorm | None, packed: LinearFn) -> Tensor:
    """Applies RMSNorm, if there is one, then a projection (QKV): x [rows, hidden] -> [rows, outputs]."""
    return packed(x if norm is None else rms_norm(x, norm))


def norm_swiglu(x: Tensor, norm: ReferenceNorm | None, gate_up: LinearFn, activation: Activation = "silu") -> Tensor:
    """Applies RMSNorm, if there is one, the gate and up projections and activation(gate) * up: x [rows, hidden] ->
    [rows, outputs / 2]."""
    return apply_gate(norm_linear(x, norm, gate_up), activation)


def apply_gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """Returns activation(gate) * up, where gate and up are the halves of the last dimension; `Activation` defines
    "clamped_swiglu"."""
    gate, up = gate_up.chunk(2, -1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return (gate * SWIGLU_ALPHA).sigmoid_().mul_(gate).mul_(up.add_(1))
    return activate(gate, activation).mul_(up)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Returns activation(x), of SiLU, ReLU or GELU in its approximation by tanh."""
    if activation == "relu":
        return x.relu()
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")


def linear_residual(
    x: Tensor,
    packed: LinearFn,
    residual: Tensor,
    reduce: Callable[[Tensor], Tensor] | None = None,
    norm: ReferenceNorm | None = None,
    multiplier: float = 1.0,
) -> Tensor:
    """Applies a projection (O, down), all-reduces it over the ranks of a group with `reduce`, applies RMSNorm, if there
    is one, multiplies by `multiplier`, and adds the residual: x [rows, inputs] and residual [rows, hidden] -> [rows,
    hidden]."""
    return add_residual(packed(x), residual, reduce, norm, multiplier)


def add_residual(
    product: Tensor,
    residual: Tensor,
    reduce: Callable[[Tensor], Tensor] | None,
    norm: ReferenceNorm | None,
    multiplier: float,
) -> Tensor:
    """The part of `linear_residual` after the projection, whose result is `product`; may overwrite it."""
    if reduce is not None:
        product = reduce(product)
    if norm is not None:
        product = rms_norm(product, norm)
    if multiplier != 1:
        product.mul_(multiplier)
    return product.add_(residual)


def norm_head(
    x: Tensor, norm: ReferenceNorm, packed: LinearFn, multiplier: float = 1.0, softcap: float | None = None
) -> Tensor:
    """Applies the final RMSNorm and the LM head, multiplies by `multiplier` and applies the soft cap: x [rows, hidden]
    -> logits [rows, vocab], float32, or float64 in a float64 model."""
    logits = packed(rms_norm(x, norm)).to(norm.eps.dtype)
    if multiplier != 1:
        logits.mul_(multiplier)
    if softcap is None:
        return logits
    masked = logits == -torch.inf  # the outputs of `mask_outputs` stay -inf
    return soft_cap(logits, softcap).masked_fill_(masked, -torch.inf)
