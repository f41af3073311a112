"""Cross entropy of an LM head to soft targets, computed together with its gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ROWS = 64  # rows whose float32 logits fit in the L2 cache


class LinearCrossEntropy(torch.autograd.Function):
    """Sum over rows of the cross entropy between a sparse distribution and softmax(hidden @ weight.T).

    The logits are kept in `dtype` alone, and the forward replaces them by their gradients.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, probs: Tensor, dtype: torch.dtype) -> Tensor:
        """hidden [rows, hidden], weight [columns, hidden]; ids, probs [rows, k]: columns and their probabilities, whose
        sum is 1. `dtype`: of the products."""
        wide = torch.promote_types(dtype, torch.float32)
        narrow_hidden, narrow_weight, probs = hidden.to(dtype), weight.to(dtype), probs.to(wide)
        logits = narrow_hidden @ narrow_weight.T
        total = torch.zeros((), dtype=wide)
        for part, columns, wanted in zip(*(x.split(CHUNK_ROWS) for x in (logits, ids, probs)), strict=True):
            found = part.softmax(1, dtype=wide)
            total -= (found.gather(1, columns).clamp_min(1e-30).log() * wanted).sum()
            part.copy_(found.scatter_add_(1, columns, -wanted))
        grads = logits @ narrow_weight, logits.T @ narrow_hidden
        ctx.save_for_backward(*(grad.to(x.dtype) for grad, x in zip(grads, (hidden, weight), strict=True)))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * grads[0], weight_grad * grads[0], None, None, None
