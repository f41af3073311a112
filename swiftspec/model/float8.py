"""Weights moved by powers of two, so that keys and values fit float8 e4m3 as they are: a cache of it needs no scales.

The format has 4 bits of exponent and 3 of mantissa: up to 448, and as exact as it gets down to 1/64. A key is
W_k x + b_k, turned by its position, and x the output of an RMSNorm: a vector no longer than sqrt(D), times the norm's
weight. So the rows of W_k bound every key, whatever the text, and those of W_v every value. What is usual lies about
sqrt(D) below the bound, and the format reaches another 2^8 further down.

W_k / 2^e with W_q 2^e leave the scores as they were, W_v / 2^e with W_o 2^e the outputs, to the bit.

Letters: D the hidden size, H query heads, G key-value heads, hd the head's width; of a rank its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swiftspec.model.formats.int4 import Int4Weight
from swiftspec.model.weights import DenseWeight, LayerWeights, ModelWeights

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
SLACK = 1.0625  # what roundings on the way to the cache may add


@dataclass(frozen=True, slots=True)
class Fp8KVScale:
    """The heads of a model, or of a rank's share of it, whose keys and values are to fit."""

    heads: int
    kv_heads: int
    head_dim: int

    def of_weights(self, weights: ModelWeights) -> ModelWeights:
        """The same model, whose keys and values fit."""
        return replace(weights, layers=[partial(self._layer, read) for read in weights.layers])

    def _layer(self, read: Callable[[], LayerWeights]) -> LayerWeights:
        layer = read()
        keys, values = (2.0 ** _exponent(reach) for reach in self.reach(layer))
        kv = self.kv_heads * self.head_dim
        runs = ((self.heads * self.head_dim, keys), (kv, 1 / keys), (kv, 1 / values))
        full = partial(torch.full, dtype=torch.float32, device=layer.input_norm.device)
        factors = torch.cat([full((rows,), factor) for rows, factor in runs])
        qkv: Any = _scaled(layer.qkv, factors)
        if qkv.bias is not None:
            qkv = replace(qkv, bias=qkv.bias * factors)
        return replace(layer, qkv=qkv, o=_scaled(layer.o, full(layer.input_norm.shape, values)))

    def reach(self, layer: LayerWeights) -> tuple[float, float]:
        """The largest that an element of a key, and one of a value, can be before it is rounded."""
        first, count = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        part = layer.qkv.outputs(torch.arange(first, first + count))
        matrix = part.dequantize(torch.float32) * layer.input_norm.float()
        most = matrix.norm(dim=1) * math.sqrt(matrix.shape[1])
        if part.bias is not None:
            most = most + part.bias.float().abs()
        keys, values = most.view(2, self.kv_heads, 2, self.head_dim // 2)
        return float(keys.norm(dim=1).max()), float(values.max())  # RoPE turns the two halves of a key into each other


def _exponent(reach: float) -> int:
    """The power of two that the reach is divided by."""
    return math.frexp(SLACK * reach / LARGEST)[1] if 0 < reach < math.inf else 0


def _scaled(weight: Any, factors: Tensor) -> Any:
    """A matrix whose rows are taken times powers of two [N]; its bias stays."""
    if isinstance(weight, Int4Weight):
        weight = weight.joined()
        across = factors.unsqueeze(1) if weight.order == "inputs" else factors
        return replace(weight, scales=weight.scales * across)
    assert isinstance(weight, DenseWeight)
    return replace(weight, weight=weight.weight * factors.unsqueeze(1))
