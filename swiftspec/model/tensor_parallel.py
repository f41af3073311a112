"""What a model needs of the ranks that share it: the only arithmetic with communication (paper section 4).

Sums are taken in rank order and on every rank alike, so hidden states and logits are equal to the bit on all ranks of a
group, and what follows from them needs no messages.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class TensorParallelGroup(Protocol):
    """Ranks that share one model. Every rank calls the same operations in the same order."""

    rank: int
    size: int
    memory: Any  # what operators that sum by themselves share with the other ranks; None: sums are made here alone

    def all_reduce(self, x: Tensor, /) -> Tensor:
        """The sum of the ranks' x [n, D], as `sum_in_rank_order` has it; perhaps in place."""
        ...

    def all_gather(self, x: Tensor, /) -> Tensor:
        """The ranks' x, in rank order: [size, *x.shape]."""
        ...

    def captures(self, x: Tensor, /) -> bool:
        """Whether `all_gather` of x, and the sums of a forward, may be part of a CUDA graph."""
        ...

    def lost(self, error: Exception, /) -> Exception | None:
        """What to raise in place of an error of the device or of the memory that ranks share; None where no lost peer
        is behind it."""
        ...
