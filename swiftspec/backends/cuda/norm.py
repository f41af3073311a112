"""Packed RMSNorms on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CudaNorm:
    """The weight and epsilon of an RMSNorm."""

    weight: Tensor  # [hidden] or [heads + kv_heads, head_dim], bfloat16
    eps: float


def pack_norm(weight: Tensor, eps: float, dtype: torch.dtype, device: torch.device | str) -> CudaNorm:
    """Packs an RMSNorm with weight [hidden] or [heads + kv_heads, head_dim]."""
    packed = weight.to(device, dtype).contiguous()
    if packed.is_cuda:  # projections copy it to shared memory before they wait for preceding kernels
        torch.cuda.current_stream(packed.device).synchronize()
    return CudaNorm(packed, eps)
