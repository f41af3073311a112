"""What the target accepted, counted by depth and by the rank of a child among its siblings."""

from __future__ import annotations

from collections.abc import Sequence


class Acceptance:
    """Counts over rounds. `tried` and `accepted` go together: of so many chances so many were taken.

    A chance at depth j is a round whose accepted path came to depth j and had children proposed there, of which one
    may be the next. A chance of the child of rank r is a node on an accepted path with more than r children proposed:
    siblings stand in the draft's order, the likeliest first, so rank 0 is its first choice.
    """

    def __init__(self) -> None:
        self.histogram: list[int] = []  # rounds that accepted j draft tokens
        self.tried_at_depth: list[int] = []  # of the path's node j, which stands at depth j
        self.accepted_at_depth: list[int] = []
        self.tried_child: list[int] = []
        self.accepted_child: list[int] = []

    def count(self, parents: Sequence[int], path: Sequence[int]) -> None:
        """Adds a round: a proposal's `parents`, and the nodes that were accepted, the root first."""
        _add(self.histogram, len(path) - 1)
        for depth, node in enumerate(path):
            children = [child for child, parent in enumerate(parents) if parent == node]
            if not children:
                continue
            _add(self.tried_at_depth, depth)
            for rank in range(len(children)):
                _add(self.tried_child, rank)
            if depth + 1 < len(path):
                _add(self.accepted_at_depth, depth)
                _add(self.accepted_child, children.index(path[depth + 1]))


def _add(counts: list[int], at: int) -> None:
    counts += [0] * (at + 1 - len(counts))
    counts[at] += 1
