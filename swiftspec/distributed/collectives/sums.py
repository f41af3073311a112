"""The one order in which the parts of a sum are added, so that every rank gets the same bits."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_in_rank_order(parts: Tensor) -> Tensor:
    """[size, ...] -> [...]: one part after the other, in float32 (float64 stays), rounded once."""
    wide = torch.float64 if parts.dtype == torch.float64 else torch.float32
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)
