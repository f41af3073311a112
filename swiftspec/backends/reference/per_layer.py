"""Per-layer embeddings. Shapes as in reference/__init__.py; `ModelSpec.per_layer_size` defines them."""

from __future__ import annotations

from torch import Tensor

from swiftspec.backends.reference.linear import activate, embed, linear_residual, rms_norm
from swiftspec.model.packed_model import PackedPerLayer, PackedPerLayerPart

EMBEDDING_SCALE = 2**-0.5  # of the sum of the projection and the row of the table


def per_layer_embeddings(tokens: Tensor, hidden: Tensor, weights: PackedPerLayer) -> Tensor:
    """Returns the per-layer embeddings of tokens [rows]: hidden [rows, hidden], their embeddings -> [rows, layers,
    per_layer_size]."""
    size = weights.norm.weight.shape[0]
    rows = embed(tokens, weights.table, weights.multiplier).view(len(tokens), -1, size)
    return rms_norm(weights.projection(hidden).view_as(rows), weights.norm).add_(rows).mul_(EMBEDDING_SCALE)


def add_per_layer(hidden: Tensor, embedding: Tensor, weights: PackedPerLayerPart) -> Tensor:
    """Adds RMSNorm(projection(activation(gate(hidden)) * embedding)): hidden [rows, hidden] and embedding [rows,
    per_layer_size], the layer's per-layer embeddings -> [rows, hidden]. All ranks of a group compute the same."""
    gated = activate(weights.gate(hidden), weights.activation).mul_(embedding)
    return linear_residual(gated, weights.projection, hidden, None, weights.norm)
