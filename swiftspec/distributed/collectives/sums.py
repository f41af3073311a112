"""Reduction in rank order, bitwise identical on every rank."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_in_rank_order(parts: Tensor) -> Tensor:
    """[size, ...] -> [...]: adds the parts in rank order in float32 (float64 for float64), and rounds once."""
    wide = torch.float64 if parts.dtype == torch.float64 else torch.float32
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)
