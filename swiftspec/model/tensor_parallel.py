"""Collectives that a model needs from its tensor-parallel group (paper section 4).

Every rank adds in rank order, so hidden states and logits are bitwise identical on all ranks of a group, and what the
ranks compute from them needs no further messages.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class TensorParallelGroup(Protocol):
    """The ranks that share one model. All ranks call the same operations in the same order."""

    rank: int
    size: int
    memory: Any  # shared-memory collectives, for native forwards that all-reduce themselves; or None

    def all_reduce(self, x: Tensor, /) -> Tensor:
        """Returns the sum of x [rows, hidden] over all ranks, added in rank order (see `sum_in_rank_order`). May
        overwrite x."""
        ...

    def all_gather(self, x: Tensor, /) -> Tensor:
        """Returns x of all ranks in rank order: [size, *x.shape]."""
        ...

    def captures(self, x: Tensor, /) -> bool:
        """Returns whether `all_gather` of x, and the all-reduces of a forward, can be captured in a CUDA graph."""
        ...

    def lost(self, error: Exception, /) -> Exception | None:
        """Returns the exception to raise instead of `error`, an error of the device or of shared memory, if the loss of
        a peer caused it. Returns None if it had another cause."""
        ...
