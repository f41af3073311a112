"""What the target accepted, by depth and by the rank of a child among its siblings, and what was to be expected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Acceptance:
    """Counts over rounds. `tried` and `accepted` go together: of so many chances so many were taken.

    A chance at depth j is a round whose accepted path came to depth j and had children proposed there, of which one
    may be the next. A chance of the child of rank r is a node on an accepted path with more than r children proposed:
    siblings stand in the draft's order, the likeliest first, so rank 0 is its first choice.

    Where children are drawn and verified by rejection, the first is accepted with chance 1 - TV(p, q) before it is
    drawn: `expected` sums that over the chances of rank 0, `judged` of them (Leviathan et al. 2023, theorem 3.5).
    """

    def __init__(self) -> None:
        self.histogram: list[int] = []  # rounds that accepted j draft tokens
        self.tried_at_depth: list[int] = []  # of the path's node j, which stands at depth j
        self.accepted_at_depth: list[int] = []
        self.tried_child: list[int] = []
        self.accepted_child: list[int] = []
        self.expected = 0.0
        self.judged = 0

    @staticmethod
    def from_rounds(rounds: Iterable[tuple[Sequence[int], Sequence[int], Sequence[float]]]) -> Acceptance:
        """Of rounds: a proposal's parents, the path that was accepted, and its overlaps."""
        seen = Acceptance()
        for round_ in rounds:
            seen.add(*round_)
        return seen

    @property
    def expected_rate(self) -> float | None:
        """The mean of 1 - TV(p, q), which the first child's acceptance rate comes to. None where no q was told."""
        return self.expected / self.judged if self.judged else None

    def add(self, parents: Sequence[int], path: Sequence[int], overlaps: Sequence[float] = ()) -> None:
        """Adds a round: a proposal's `parents`, the nodes that were accepted, the root first, and of those with drawn
        children 1 - TV(p, q)."""
        self.expected += sum(overlaps)
        self.judged += len(overlaps)
        _add(self.histogram, len(path) - 1)
        depths = {node: depth for depth, node in enumerate(path)}
        siblings = [0] * len(path)  # so far, under each node of the path
        for child, parent in enumerate(parents):
            depth = depths.get(parent)
            if depth is None:
                continue
            rank = siblings[depth]
            siblings[depth] += 1
            _add(self.tried_child, rank)
            if child in depths:
                _add(self.accepted_at_depth, depth)
                _add(self.accepted_child, rank)
        for depth, children in enumerate(siblings):
            if children:
                _add(self.tried_at_depth, depth)


def _add(counts: list[int], at: int) -> None:
    if at >= len(counts):
        counts += [0] * (at + 1 - len(counts))
    counts[at] += 1
