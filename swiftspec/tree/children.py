"""Child selectors, which choose the children of expanded leaves: protocol and top-k (sampled_children.py samples)."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.messages import DraftProbs
from swiftspec.sampling.sampler import Paths, Sampler
from swiftspec.tree.tree import Ints, Leaves


class NativeDraws(Protocol):
    """Draws of children that native code can make instead of `ChildSelector.rank`; see `SampledChildren`."""

    def draw_state(self) -> Any: ...
    def count_leaves(self, count: int, /) -> None: ...


class ChildSelector(Protocol):
    """Chooses the children of expanded leaves in one draft tree, and keeps the draft distributions that rejection
    sampling needs.

    `sampled`: whether children are random draws from the draft's distribution. If so, whether a node is expanded or
    proposed must not depend on its own draw.
    """

    sampled: bool

    @property
    def draws(self) -> NativeDraws | None:
        """How native code can draw the children; None unless they are sampled."""
        ...

    def open(self, sampler: Sampler, position: int, tau: float) -> None:
        """Starts a request. `position`: absolute position of the root. `tau`: calibration of the children's weights to
        the probability that the target accepts them, see `EngineConfig.calibration_for`."""
        ...

    def rank(
        self, logits: Tensor, leaves: Leaves, paths: Paths | None, positions: Tensor
    ) -> tuple[Ints, NDArray[np.floating]]:
        """Returns k children of each leaf: tokens [leaves, k] and log-weights [leaves, k].

        `logits` [leaves, vocab]: raw. `paths`: paths of the leaves, required if `Sampler.needs_paths`. `positions`
        [leaves]: absolute positions of the leaves.
        """
        ...

    def reroot(self) -> bool:
        """Called before the tree is re-rooted to one of its nodes. Returns False if it must be reset instead."""
        ...

    def retain_slots(self, slots: list[int]) -> None:
        """Renumbers per-slot data after a re-root: tree slot `slots[i]` becomes slot i, all others are freed. `slots`
        ascend; an empty list means that the tree was reset."""
        ...

    def draft_probs(self, slots: Ints) -> DraftProbs | None:
        """Returns the draft distributions that are sent with a proposal, or None if it is sent without them. `slots`:
        tree slots of the proposal's nodes that have children, in node order; the result has one row for each."""
        ...


class TopChildren:
    """Child selector for the k most likely tokens; with `coupled`, the most likely ones under the target's noise."""

    sampled = False
    draws = None

    def __init__(self, k: int, coupled: bool) -> None:
        self.k, self.coupled = k, coupled

    def open(self, sampler: Sampler, position: int, tau: float) -> None:
        self._sampler, self._tau = sampler, tau

    def rank(
        self, logits: Tensor, leaves: Leaves, paths: Paths | None, positions: Tensor
    ) -> tuple[Ints, NDArray[np.floating]]:
        best = self._sampler.children(logits, paths, positions, k=self.k, coupled=self.coupled, tau=self._tau)
        tokens, weights = self._sampler.read(*best)
        return tokens, weights

    def reroot(self) -> bool:
        return True

    def retain_slots(self, slots: list[int]) -> None:
        pass

    def draft_probs(self, slots: Ints) -> DraftProbs | None:
        return None
