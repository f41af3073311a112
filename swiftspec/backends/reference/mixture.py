"""MLPs: dense ones, and mixtures of experts. Shapes as in reference/__init__.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from swiftspec.backends.reference.linear import add_residual, linear_residual, norm_swiglu, rms_norm
from swiftspec.backends.reference.packing import LinearFn, ReferenceNorm, pack
from swiftspec.model.packed_model import PackedMixture, PackedMlp
from swiftspec.model.spec import SMALLEST_SUM, ExpertsSpec, MlpSpec, SigmoidRouting
from swiftspec.model.weights import LayerWeights, Weight, split_experts


def pack_router(weight: Weight, dtype: torch.dtype, device: torch.device | str) -> LinearFn:
    """Packs the router of a mixture, with the gate of the shared expert if there is one. Both compute in float32, or in
    float64 in a float64 model."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    packed = pack(weight, wide, device)
    return lambda x: packed(x.to(wide))


def pack_correction(weights: LayerWeights, dtype: torch.dtype, device: torch.device | str) -> Tensor | None:
    """Returns the correction bias of sigmoid scores in the dtype of the router's products, or None if there is none."""
    wide = torch.promote_types(dtype, torch.float32)
    return None if weights.correction is None else weights.correction.to(device, wide, copy=True)


def pack_shared_expert(
    weights: LayerWeights, spec: MlpSpec, dtype: torch.dtype, device: torch.device | str
) -> PackedMlp | None:
    """Packs the shared expert of a mixture. Returns None if there is none."""
    if weights.shared_gate_up is None or weights.shared_down is None:
        return None
    gate_up, down = (pack(weight, dtype, device) for weight in (weights.shared_gate_up, weights.shared_down))
    return PackedMlp(gate_up, down, spec.activation)


def pack_mixture(weights: LayerWeights, spec: MlpSpec, dtype: torch.dtype, device: torch.device | str) -> PackedMixture:
    """Packs the MLP of a layer that is a mixture of experts: a list of projections, one for each expert."""
    assert weights.router is not None and spec.experts is not None
    gate_up, down = (
        [pack(part, dtype, device) for part in split_experts(weight, spec.num_experts)]
        for weight in (weights.gate_up, weights.down)
    )
    router, shared = pack_router(weights.router, dtype, device), pack_shared_expert(weights, spec, dtype, device)
    correction = pack_correction(weights, dtype, device)
    return PackedMixture(router, gate_up, down, spec.experts, spec.activation, shared, correction=correction)


def choose_experts(logits: Tensor, spec: ExpertsSpec, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the experts of each row, ascending, and their weights: each [rows, experts_per_token]. `logits`: outputs
    of the router, [rows, router_rows]. `correction`: see `SigmoidRouting`."""
    logits = logits[:, : spec.num_experts]
    if spec.sigmoid is None or correction is None:
        scores = ranks = logits.softmax(-1)
        multiplier, floor = 1.0, 0.0
    else:
        scores, multiplier, floor = logits.sigmoid(), spec.sigmoid.multiplier, SMALLEST_SUM
        ranks = _within_groups(scores + correction, spec.sigmoid)
    experts = ranks.topk(spec.experts_per_token)[1].sort(-1)[0]
    weights = scores.gather(-1, experts)
    if spec.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + floor)
    return experts, weights * multiplier


def _within_groups(ranks: Tensor, routing: SigmoidRouting) -> Tensor:
    """Returns ranks [rows, experts] that are -inf outside the groups that a row may use."""
    if routing.groups == routing.groups_per_token:
        return ranks
    grouped = ranks.unflatten(-1, (routing.groups, -1))
    best = grouped.topk(2)[0].sum(-1).topk(routing.groups_per_token)[1]
    used = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=ranks.device).scatter_(1, best, True)
    return grouped.masked_fill(~used.unsqueeze(-1), -torch.inf).flatten(1)


def add_shared_expert(out: Tensor, x: Tensor, logits: Tensor, shared: PackedMlp | None) -> Tensor:
    """Adds the output of the shared expert for x [rows, hidden], times its gate, to `out` [rows, hidden] in place, and
    returns it. `logits`: as of `choose_experts`; the last one of a row is that of the gate."""
    if shared is None:
        return out
    product = shared.down(norm_swiglu(x, None, shared.gate_up, shared.activation))
    return out.addcmul_(product.to(out.dtype), logits[:, -1:].sigmoid())


def mlp(
    hidden: Tensor,
    norm: ReferenceNorm | None,
    weights: PackedMlp | PackedMixture,
    residual: Tensor,
    reduce: Callable[[Tensor], Tensor] | None = None,
    output_norm: ReferenceNorm | None = None,
    multiplier: float = 1.0,
) -> Tensor:
    """Applies RMSNorm, the MLP down(activation(gate) * up), or the mixture of experts, the all-reduce over the ranks of
    a group with `reduce`, the norm of the output, `multiplier`, and adds the residual: hidden [rows, hidden]
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
    """Returns the weighted sum of the experts of each row, in the order of the experts, the shared one last: x [rows,
    hidden] -> [rows, hidden]. Reads on the host which experts have rows."""
    logits: Tensor = weights.router(x)
    experts, shares = choose_experts(logits, weights.experts, weights.correction)
    out = torch.zeros_like(x, dtype=shares.dtype)
    for expert in experts.unique().tolist():
        rows, places = (experts == expert).nonzero(as_tuple=True)
        gated = norm_swiglu(x[rows], None, weights.gate_up[expert], weights.activation)
        product = weights.down[expert](gated).to(out.dtype)
        out.index_add_(0, rows, product.mul_(shares[rows, places].unsqueeze(1)))
    return add_shared_expert(out, x, logits, weights.shared).to(x.dtype)
