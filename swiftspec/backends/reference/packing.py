"""What is made of weights when they are loaded. Letters as in this room's __init__."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec.model.weights import Weight

Packed = Callable[[Tensor], Tensor]  # a projection made ready at load: [n, K] -> [n, N]
PREPACK_ROWS = 8  # oneDNN lays a weight out for this many rows; any other number is computed too


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
