"""Two drafters on one tree, to measure what a draft head and a draft model add to each other."""

from __future__ import annotations

from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.runtime.drafter import Drafter
from swiftspec.tree.merged_proposal import merge_proposals


class MergedDrafter:
    """Drafter that proposes the nodes with the largest weights of two other drafters, at most as many as one of them
    may propose. The engine has no such drafter, because it is slower than its parts (docs/decisions/tree-and-cache.md).
    """

    lost_reason = None

    def __init__(self, first: Drafter, second: Drafter, max_nodes: int) -> None:
        self._first, self._second, self._max_nodes = first, second, max_nodes

    @property
    def busy(self) -> float:
        return self._first.busy + self._second.busy

    def open(self, start: RequestStart) -> None:
        self._first.open(start)
        self._second.open(start)

    def propose(self) -> Proposal:
        first, second = self._first.propose(), self._second.propose()
        return merge_proposals(first, second, lambda weights: min(len(weights), self._max_nodes - 1))

    def grow(self) -> None:
        self._first.grow()
        self._second.grow()

    def observe(self, result: VerifyResult) -> None:
        self._first.observe(result)
        self._second.observe(result)

    def close(self) -> None:
        self._first.close()
        self._second.close()
