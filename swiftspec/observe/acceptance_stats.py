"""Acceptance statistics by depth and by the rank of a child among its siblings, and the expected acceptance rate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Acceptance:
    """Counts over rounds. `tried_*` and `accepted_*` belong together: attempts and acceptances.

    An attempt at depth j is a round whose accepted path reached depth j and had children proposed there, one of which
    may be next. An attempt of the child of rank r is a node on an accepted path with more than r proposed children:
    siblings are in the draft's order, the most likely one first, so rank 0 is its first choice.

    Where children are sampled and verified by rejection, the first one is accepted with probability 1 - TV(p, q) before
    it is drawn: `expected` sums that over the attempts of rank 0, and `judged` is their number (Leviathan et al. 2023,
    theorem 3.5).
    """

    def __init__(self) -> None:
        self.histogram: list[int] = []  # rounds that accepted j draft tokens
        self.tried_at_depth: list[int] = []  # of the path's node at depth j
        self.accepted_at_depth: list[int] = []
        self.tried_child: list[int] = []
        self.accepted_child: list[int] = []
        self.expected = 0.0
        self.judged = 0

    @staticmethod
    def from_rounds(rounds: Iterable[tuple[Sequence[int], Sequence[int], Sequence[float]]]) -> Acceptance:
        """Counts rounds: a proposal's parents, the accepted path, and its overlaps."""
        seen = Acceptance()
        for round_ in rounds:
            seen.add(*round_)
        return seen

    @property
    def expected_rate(self) -> float | None:
        """The mean of 1 - TV(p, q), the expected acceptance rate of the first child. None if no probabilities of the
        draft were recorded."""
        return self.expected / self.judged if self.judged else None

    def add(self, parents: Sequence[int], path: Sequence[int], overlaps: Sequence[float] = ()) -> None:
        """Adds a round.

        `parents`: of the proposal's nodes.
        `path`: the accepted nodes, the root first.
        `overlaps`: 1 - TV(p, q) of the path's nodes with sampled children.
        """
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
