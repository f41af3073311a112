"""Mixtures of experts in torch kernels whose shapes do not depend on the routing, so that CUDA graphs can contain them.
Shapes as in reference/__init__.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from swiftspec.backends.reference import mixture
from swiftspec.backends.reference.linear import add_residual, apply_gate, rms_norm
from swiftspec.backends.reference.mixture import (
    add_shared_expert,
    choose_experts,
    pack_correction,
    pack_router,
    pack_shared_expert,
)
from swiftspec.backends.reference.packing import ReferenceNorm
from swiftspec.model.packed_model import PackedMixture, PackedMlp
from swiftspec.model.spec import MlpSpec
from swiftspec.model.weights import LayerWeights, Weight, split_experts

GATHER_COST = 3  # a gathered matrix is read, written and read again; in a product with all experts it is read once


def pack_mixture(weights: LayerWeights, spec: MlpSpec, dtype: torch.dtype, device: torch.device | str) -> PackedMixture:
    """Packs the MLP of a layer that is a mixture of experts: dense matrices [num_experts, outputs, inputs]."""
    assert weights.router is not None and spec.experts is not None
    router, shared = pack_router(weights.router, dtype, device), pack_shared_expert(weights, spec, dtype, device)
    gate_up, down = (
        _stack_experts(weight, spec.num_experts, dtype, device) for weight in (weights.gate_up, weights.down)
    )
    gate_up_bias, down_bias = (
        None if bias is None else bias.to(device, dtype).view(spec.num_experts, -1)
        for bias in (weights.gate_up.bias, weights.down.bias)
    )
    return PackedMixture(
        router=router,
        gate_up=gate_up,
        down=down,
        experts=spec.experts,
        activation=spec.activation,
        shared=shared,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        correction=pack_correction(weights, dtype, device),
    )


def _stack_experts(weight: Weight, count: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    outputs, inputs = weight.shape
    stacked = torch.empty(count, outputs // count, inputs, dtype=dtype, device=device)
    for expert, part in zip(stacked, split_experts(weight, count), strict=True):
        expert.copy_(part.dequantize(dtype))
    return stacked


def mlp(
    hidden: Tensor,
    norm: ReferenceNorm | None,
    weights: PackedMlp | PackedMixture,
    residual: Tensor,
    reduce: Callable[[Tensor], Tensor] | None = None,
    output_norm: ReferenceNorm | None = None,
    multiplier: float = 1.0,
) -> Tensor:
    """As `reference.mixture.mlp`, without reading on the host which experts a mixture uses."""
    if not isinstance(weights, PackedMixture):
        return mixture.mlp(
            hidden, norm, weights, residual, reduce=reduce, output_norm=output_norm, multiplier=multiplier
        )
    x = hidden if norm is None else rms_norm(hidden, norm)
    logits: Tensor = weights.router(x)
    experts, shares = choose_experts(logits, weights.experts, weights.correction)
    gathers = GATHER_COST * experts.numel() < weights.experts.num_experts
    product = (_chosen_experts if gathers else _all_experts)(x, weights, experts, shares)
    product = add_shared_expert(product, x, logits, weights.shared)
    return add_residual(product.to(x.dtype), residual, reduce, output_norm, multiplier)


def _chosen_experts(x: Tensor, weights: PackedMixture, experts: Tensor, shares: Tensor) -> Tensor:
    """Gathers the matrices of one expert of each row after the other."""
    out = torch.zeros_like(x, dtype=shares.dtype)
    for chosen, share in zip(experts.unbind(1), shares.unbind(1), strict=True):
        gate_up = torch.bmm(weights.gate_up.index_select(0, chosen), x.unsqueeze(2)).squeeze(2)
        if weights.gate_up_bias is not None:
            gate_up += weights.gate_up_bias.index_select(0, chosen)
        gated = apply_gate(gate_up, weights.activation)
        product = torch.bmm(weights.down.index_select(0, chosen), gated.unsqueeze(2)).squeeze(2)
        if weights.down_bias is not None:
            product += weights.down_bias.index_select(0, chosen)
        out.addcmul_(product.to(out.dtype), share.unsqueeze(1))
    return out


def _all_experts(x: Tensor, weights: PackedMixture, experts: Tensor, shares: Tensor) -> Tensor:
    """Computes all experts for all rows."""
    gate_up = torch.matmul(x, weights.gate_up.mT)  # [num_experts, rows, 2 * inner]
    if weights.gate_up_bias is not None:
        gate_up += weights.gate_up_bias.unsqueeze(1)
    products = torch.bmm(apply_gate(gate_up, weights.activation), weights.down.mT)
    if weights.down_bias is not None:
        products += weights.down_bias.unsqueeze(1)
    products = products.to(shares.dtype)
    by_expert = shares.new_zeros(x.shape[0], len(products)).scatter_(1, experts, shares)
    products.masked_fill_(by_expert.T.unsqueeze(2) == 0, 0)  # those of other experts may be infinite
    return torch.einsum("re,erh->rh", by_expert, products)
