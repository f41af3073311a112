"""Packing of weights at load. Shapes as in reference/__init__.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec.model.weights import Weight

LinearFn = Callable[[Tensor], Tensor]  # a packed projection: [rows, inputs] -> [rows, outputs]


@dataclass(frozen=True, slots=True)
class ReferenceNorm:
    """A packed RMSNorm."""

    weight: Tensor  # [hidden], or [heads, head_dim] for a norm of each head
    eps: Tensor  # [], in the dtype in which the variance is computed


def pack(weight: Weight, dtype: torch.dtype, device: torch.device | str) -> LinearFn:
    """Packs a matrix [outputs, inputs] of a checkpoint. Returns `weight.product` if its format defines one, otherwise a
    dense projection in `dtype`."""
    own = weight.product(device)
    if own is not None:
        return own
    dense = weight.dequantize(dtype).to(device)
    bias = None if weight.bias is None else weight.bias.to(device, dtype)
    return lambda x: F.linear(x, dense, bias)


def mask_outputs(packed: LinearFn, outputs: Sequence[int], device: torch.device | str) -> LinearFn:
    """Returns a projection with the same weights whose `outputs` are -inf. Used for the LM head of a draft."""
    index = torch.tensor([*outputs], dtype=torch.int64, device=device)
    return lambda x: packed(x).index_fill_(-1, index, -torch.inf)


def pack_norm(weight: Tensor, eps: float, dtype: torch.dtype, device: torch.device | str) -> ReferenceNorm:
    """Packs an RMSNorm with weight [hidden] or [heads, head_dim]. The variance is computed in float32, or in float64 in
    a float64 model, and the weight is kept in that dtype."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return ReferenceNorm(weight.to(device, wide), torch.tensor(eps, dtype=wide, device=device))
