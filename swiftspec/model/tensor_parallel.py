"""Collectives that a model needs from its tensor-parallel group (paper section 4).

Sums are taken in rank order, identically on every rank, so hidden states and logits are bitwise identical on all ranks
of a group, and everything computed from them needs no further messages.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class TensorParallelGroup(Protocol):
    """The ranks that share one model. All ranks call the same operations in the same order."""

    rank: int
    size: int
    memory: Any  # shared with the other ranks by operators that all-reduce themselves; None: only `all_reduce` does

    def all_reduce(self, x: Tensor, /) -> Tensor:
        """The sum of x [n, D] over all ranks, see `sum_in_rank_order`; may be in-place."""
        ...

    def all_gather(self, x: Tensor, /) -> Tensor:
        """Gathers x of all ranks in rank order: [size, *x.shape]."""
        ...

    def captures(self, x: Tensor, /) -> bool:
        """Whether `all_gather` of x, and the all-reduces of a forward, can be captured in a CUDA graph."""
        ...

    def lost(self, error: Exception, /) -> Exception | None:
        """The error to raise instead of an error of the device or of shared memory, if it was caused by the loss of a
        peer; otherwise None."""
        ...
