"""What is made of weights when they are loaded. Letters as in this room's __init__."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec.model.weights import Weight

Packed = Callable[[Tensor], Tensor]  # a projection made ready at load: [n, K] -> [n, N]


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm made ready at load."""

    weight: Tensor  # [D]
    eps: Tensor  # [] in the dtype that the variance is computed in


def pack(weight: Weight, dtype: torch.dtype, device: torch.device | str) -> Packed:
    """A checkpoint's matrix [N, K] as a projection: a dense one, unless it has an arithmetic of its own."""
    own = weight.product(device)
    if own is not None:
        return own
    dense = weight.dequantize(dtype).to(device)
    bias = None if weight.bias is None else weight.bias.to(device, dtype)
    return lambda x: F.linear(x, dense, bias)


def pack_norm(weight: Tensor, eps: float, dtype: torch.dtype, device: torch.device | str) -> Norm:
    """An RMSNorm's weight [D] and epsilon. The variance is float32, and float64 in a float64 model."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Norm(weight.to(device, dtype), torch.tensor(eps, dtype=wide, device=device))
