"""MLPs: dense ones, and mixtures of experts. Shapes as in reference/__init__.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from swiftspec.backends.reference.linear import add_residual, linear_residual, norm_swiglu, rms_norm
from swiftspec.backends.reference.packing import LinearFn, ReferenceNorm, pack
from swiftspec.model.packed_model import PackedMixture, PackedMlp
from swiftspec.model.spec import MlpSpec
from swiftspec.model.weights import LayerWeights, Weight, split_experts


def pack_router(weight: Weight, dtype: torch.dtype, device: torch.device | str) -> LinearFn:
    """Packs the router of a mixture, which computes in float32, or in float64 in a float64 model."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    packed = pack(weight, wide, device)
    return lambda x: packed(x.to(wide))


def pack_mixture(weights: LayerWeights, spec: MlpSpec, dtype: torch.dtype, device: torch.device | str) -> PackedMixture:
    """Packs the MLP of a layer that is a mixture of experts: a list of projections, one for each expert."""
    assert weights.router is not None and spec.experts is not None
    gate_up, down = (
        [pack(part, dtype, device) for part in split_experts(weight, spec.num_experts)]
        for weight in (weights.gate_up, weights.down)
    )
    return PackedMixture(pack_router(weights.router, dtype, device), gate_up, down, spec.experts, spec.activation)


def choose_experts(x: Tensor, weights: PackedMixture) -> tuple[Tensor, Tensor]:
    """Returns the experts of each row of x [rows, hidden], ascending, and their weights: each [rows,
    experts_per_token]."""
    probabilities: Tensor = weights.router(x).softmax(-1)
    largest, chosen = probabilities.topk(weights.experts.experts_per_token)
    if weights.experts.norm_topk_prob:
        largest = largest / largest.sum(-1, keepdim=True)
    experts, order = chosen.sort(-1)
    return experts, largest.gather(-1, order)


def mlp(
    hidden: Tensor,
    norm: ReferenceNorm | None,
    weights: PackedMlp | PackedMixture,
    residual: Tensor,
    reduce: Callable[[Tensor], Tensor] | None = None,
    output_norm: ReferenceNorm | None = None,
    multiplier: float = 1.0,
) -> Tensor:
    """Applies RMSNorm, the MLP down(activation(gate) * up), or that of each row's experts, the all-reduce over the
    ranks of a group with `reduce`, the norm of the output, `multiplier`, and adds the residual: hidden [rows, hidden]
    and residual [rows, hidden] -> [rows, hidden].

    Contract, here up to rounding: a row's bits depend on its own inputs, never on the other rows, their number or
    their slots.
    """
    if isinstance(weights, PackedMixture):
        x = hidden if norm is None else rms_norm(hidden, norm)
        return add_residual(_mixture(x, weights), residual, reduce, output_norm, multiplier)
    gated = norm_swiglu(hidden, norm, weights.gate_up, weights.activation)
    return linear_residual(gated, weights.down, residual, reduce, output_norm, multiplier)


def _mixture(x: Tensor, weights: PackedMixture) -> Tensor:
    """Returns the weighted sum of the experts of each row, in the order of the experts: x [rows, hidden] -> [rows,
    hidden]. Reads on the host which experts have rows."""
    experts, shares = choose_experts(x, weights)
    out = torch.zeros_like(x, dtype=shares.dtype)
    for expert in experts.unique().tolist():
        rows, places = (experts == expert).nonzero(as_tuple=True)
        gated = norm_swiglu(x[rows], None, weights.gate_up[expert], weights.activation)
        product = weights.down[expert](gated).to(out.dtype)
        out.index_add_(0, rows, product.mul_(shares[rows, places].unsqueeze(1)))
    return out.to(x.dtype)
