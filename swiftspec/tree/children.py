"""How the children of expanded leaves are chosen, and what a proposal carries of it. Here the best; drawn.py draws."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.messages import DraftProbs
from swiftspec.sampling.sampler import Paths, Sampler
from swiftspec.tree.tree import Ints, Leaves


class ChildSelector(Protocol):
    """The children of one request's tree. `drawn`: which nodes are expanded or sent must not depend on their own draw.

    `tau` makes a child's weight the chance that the target agrees.
    """

    sampled: bool

    def open(self, sampler: Sampler, position: int, tau: float) -> None:
        """Begins a request whose root stands at an absolute position."""
        ...

    def rank(
        self, logits: Tensor, leaves: Leaves, paths: Paths | None, positions: Tensor
    ) -> tuple[Ints, NDArray[np.floating]]:
        """k children of each leaf: tokens [n, k] and log-weights [n, k], from raw logits [n, vocab]; `paths` of the
        leaves, for penalties, and their `positions` [n]."""
        ...

    def reroot(self) -> bool:
        """Told of a re-root within the tree. False: the tree has to start over."""
        ...

    def retain_slots(self, slots: list[int]) -> None:
        """Follows the tree, of whose slots these survive, ascending; none: it has started over."""
        ...

    def draft_probs(self, slots: Ints) -> DraftProbs | None:
        """What a proposal carries, of nodes with children in these tree slots, in the order of the nodes."""
        ...


class TopChildren:
    """The k likeliest children, or `coupled` those that are likeliest under the noise that the target draws with."""

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
