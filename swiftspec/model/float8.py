"""Scaling of weights by powers of two so that keys and values fit float8 e4m3; a float8 KV cache then needs no scales.

float8 e4m3 has 4 exponent and 3 mantissa bits: values up to 448, with full precision down to 1/64. A key is W_k x +
b_k, rotated by its position, where x is the output of an RMSNorm: a vector of length at most sqrt(hidden size), times
the weight of the norm. The norms of the rows of W_k therefore bound every key for any input, and those of W_v every
value. Typical values are smaller than the bound by a factor of about sqrt(hidden size), and the format has full
precision for values that are smaller by another factor of 2^8.

Replacing W_k by W_k / 2^e and W_q by W_q * 2^e leaves the attention scores bitwise identical. Replacing W_v by
W_v / 2^e and W_o by W_o * 2^e leaves the outputs of attention bitwise identical.

A model with a norm of each query and key head (`AttentionSpec.qk_norm`) would cancel a scale of W_q and W_k, so there
the scale goes into the weights of these norms. They bound the keys as well: a head after its norm has length at most
sqrt(head dimension), times the weight.
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
LARGEST = 448.0  # of float8 e4m3
SLACK = 1.0625  # margin for rounding errors


@dataclass(frozen=True, slots=True)
class Fp8KVScale:
    """Scaling of a layer's weights for a float8 KV cache. Sizes are those of the model, or of a rank's shard."""

    heads: int
    kv_heads: int
    head_dim: int
    key_factor: float = 1.0  # of the keys, from the RoPE tables

    def of_weights(self, weights: ModelWeights) -> ModelWeights:
        """Returns weights that compute the same function, with keys and values that fit float8."""
        return replace(weights, layers=[partial(self.of_layer, read) for read in weights.layers])

    def of_layer(self, read: Callable[[], LayerWeights]) -> LayerWeights:
        """Reads a layer and scales it."""
        layer = read()
        keys, values = (2.0 ** _exponent(reach) for reach in self.max_magnitudes(layer))
        kv = self.kv_heads * self.head_dim
        normed = layer.q_norm is not None and layer.k_norm is not None
        q_rows, k_rows = (1.0, 1.0) if normed else (keys, 1 / keys)
        v_rows = 1 / values if layer.v_norm is None else 1.0
        runs = ((self.heads * self.head_dim, q_rows), (kv, k_rows), (kv, v_rows))
        assert layer.input_norm is not None
        full = partial(torch.full, dtype=torch.float32, device=layer.input_norm.device)
        factors = torch.cat([full((rows,), factor) for rows, factor in runs])
        qkv: Any = _scaled(layer.qkv, factors)
        if qkv.bias is not None:
            qkv = replace(qkv, bias=qkv.bias * factors)
        o = _scaled(layer.o, full(layer.input_norm.shape, values))
        v_norm = None if layer.v_norm is None else layer.v_norm / values
        layer = replace(layer, qkv=qkv, o=o, v_norm=v_norm)
        if layer.q_norm is None or layer.k_norm is None:
            return layer
        return replace(layer, q_norm=layer.q_norm * keys, k_norm=layer.k_norm / keys)

    def max_magnitudes(self, layer: LayerWeights) -> tuple[float, float]:
        """Returns upper bounds of the magnitude of a key's and of a value's elements, before rounding."""
        assert layer.input_norm is not None
        first, count = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        part = layer.qkv.outputs(torch.arange(first, first + count))
        matrix = part.dequantize(torch.float32) * layer.input_norm.float()
        most = matrix.norm(dim=1) * math.sqrt(matrix.shape[1])
        if part.bias is not None:
            most = most + part.bias.float().abs()
        keys, values = most.view(2, self.kv_heads, 2, self.head_dim // 2)
        # RoPE rotates pairs of elements, one of each half of a key
        key, value = float(keys.norm(dim=1).max()), float(values.max())
        if layer.k_norm is not None:
            # a rotated pair has at most the length of the normed elements, times the larger of its two weights
            key = math.sqrt(layer.k_norm.numel()) * float(layer.k_norm.float().abs().max())
        if layer.v_norm is not None:
            value = math.sqrt(self.head_dim)
        return key * self.key_factor, value


def _exponent(reach: float) -> int:
    """Returns the exponent e for which values up to `reach`, divided by 2^e, fit float8. 0 if `reach` is 0 or not
    finite."""
    return math.frexp(SLACK * reach / LARGEST)[1] if 0 < reach < math.inf else 0


def _scaled(weight: Any, factors: Tensor) -> Any:
    """Returns the matrix with its rows multiplied by `factors` [outputs], powers of two; its bias is unchanged."""
    if isinstance(weight, Int4Weight):
        weight = weight.joined()
        across = factors.unsqueeze(1) if weight.order == "inputs" else factors
        return replace(weight, scales=weight.scales * across)
    matrix = weight.weight if isinstance(weight, DenseWeight) else weight.dequantize(torch.float32)
    return DenseWeight(matrix * factors.unsqueeze(1), weight.bias)
