"""Selection of the children of expanded leaves: the most likely ones here, sampled ones in sampled_children.py."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.messages import DraftProbs
from swiftspec.sampling.sampler import Paths, Sampler
from swiftspec.tree.tree import Ints, Leaves


class ChildSelector(Protocol):
    """Selects the children in the draft tree of one request, and supplies the draft distributions for a proposal.

    `sampled`: children are drawn from the draft, so whether a node is expanded or proposed must not depend on its own
    draw. `tau` calibrates a child's weight to the probability that the target agrees.
    """

    sampled: bool

    def open(self, sampler: Sampler, position: int, tau: float) -> None:
        """Begins a request whose root is at an absolute position."""
        ...

    def rank(
        self, logits: Tensor, leaves: Leaves, paths: Paths | None, positions: Tensor
    ) -> tuple[Ints, NDArray[np.floating]]:
        """Returns k children of each leaf: tokens [n, k] and log-weights [n, k]. `logits` [n, vocab] are raw; `paths`
        of the leaves are used for penalties; `positions` [n] are those of the leaves."""
        ...

    def reroot(self) -> bool:
        """Called after a re-root within the tree. Returns False if the tree has to be reset."""
        ...

    def retain_slots(self, slots: list[int]) -> None:
        """Keeps the data of the surviving tree slots, which are in ascending order. An empty list means that the tree
        was reset and that all data is obsolete."""
        ...

    def draft_probs(self, slots: Ints) -> DraftProbs | None:
        """The draft distributions for a proposal: one row for each of these tree slots, which belong to its nodes with
        children, in node order."""
        ...


class TopChildren:
    """The k most likely children, or, if `coupled`, those that are most likely under the target's sampling noise."""

    sampled = False

    def __init__(self, k: int, coupled: bool) -> None:
        self.k, self.coupled = k, coupled

    def open(self, sampler: Sampler, position: int, tau: float) -> None:
        self._sampler, self._tau = sampler, tau

    def rank(
        self, logits: Tensor, leaves: Leaves, paths: Paths | None, positions: Tensor
    ) -> tuple[Ints, NDArray[np.floating]]:
        best = self._sampler.children(logits, paths, positions, k=self.k, coupled=self.coupled, tau=self._tau)
        return best[0].cpu().numpy(), best[1].cpu().numpy()

    def reroot(self) -> bool:
        return True

    def retain_slots(self, slots: list[int]) -> None:
        pass

    def draft_probs(self, slots: Ints) -> DraftProbs | None:
        return None
