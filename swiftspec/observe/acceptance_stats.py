"""Acceptance statistics: by depth, by the rank of a node among its siblings, by source, and the expected acceptance
rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from swiftspec.messages import NodeSource


class Acceptance:
    """Attempts (`tried_*`) and acceptances (`accepted_*`) of draft tokens, counted over rounds.

    `histogram[j]`: number of rounds that accepted j draft tokens.
    `tried_at_depth[j]`: number of rounds whose accepted path has a node with proposed children at depth j (root: 0).
    `accepted_at_depth[j]`: number of those in which one of these children was accepted.
    `tried_child[r]`: number of nodes on accepted paths with more than r proposed children. Siblings are in the draft's
    order, the most likely one first, so the child of rank 0 is the draft's first choice.
    `accepted_child[r]`: number of those whose child of rank r was accepted.
    `proposed_by_source`, `accepted_by_source`: number of proposed and of accepted nodes of each source.

    With sampled children and rejection sampling, the first child of a node is accepted with probability 1 - TV(p, q),
    where TV is the total variation distance (Leviathan et al. 2023, theorem 3.5). `expected` is the sum of this
    probability over the nodes with sampled children on accepted paths, and `judged` is the number of these nodes.
    """

    def __init__(self) -> None:
        self.histogram: list[int] = []
        self.tried_at_depth: list[int] = []
        self.accepted_at_depth: list[int] = []
        self.tried_child: list[int] = []
        self.accepted_child: list[int] = []
        self.proposed_by_source = Counter[NodeSource]()
        self.accepted_by_source = Counter[NodeSource]()
        self.expected = 0.0
        self.judged = 0

    @staticmethod
    def from_rounds(rounds: Iterable[tuple[Any, ...]]) -> Acceptance:
        """Returns the statistics of `rounds`, each a tuple of the arguments of `add`, such as `VerifiedRound`."""
        seen = Acceptance()
        for round_ in rounds:
            seen.add(*round_)
        return seen

    @property
    def expected_rate(self) -> float | None:
        """Mean of 1 - TV(p, q), the expected acceptance rate of the first child. None if no round had overlaps."""
        return self.expected / self.judged if self.judged else None

    def add(
        self,
        parents: Sequence[int],
        path: Sequence[int],
        overlaps: Sequence[float] = (),
        sources: Sequence[NodeSource] = (),
        is_cut: bool = False,
    ) -> None:
        """Adds a round.

        `parents`: parent of each node of the proposal, -1 for the root.
        `path`: nodes of the accepted path, the root first, as many as the round has output tokens.
        `overlaps`: 1 - TV(p, q) of each node that has sampled children, in the order of the path before it was cut.
        `sources`: source of each node of the proposal; if empty, the draft model for all nodes except the root.
        `is_cut`: the output ended at the last node of `path`; whether one of its children was accepted does not count.
        """
        sources = sources or (NodeSource.ROOT, *[NodeSource.DRAFT_MODEL] * (len(parents) - 1))
        self.proposed_by_source.update(sources[1:])
        self.accepted_by_source.update(sources[node] for node in path[1:])
        _add(self.histogram, len(path) - 1)
        depths = {node: depth for depth, node in enumerate(path)}
        siblings = [0] * len(path)  # children seen so far of each node of the path
        for child, parent in enumerate(parents):
            depth = depths.get(parent)
            if depth is None or (is_cut and depth == len(path) - 1):
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
        judged = overlaps[: sum(children > 0 for children in siblings)] if is_cut else overlaps
        self.expected += sum(judged)
        self.judged += len(judged)


def _add(counts: list[int], at: int) -> None:
    if at >= len(counts):
        counts += [0] * (at + 1 - len(counts))
    counts[at] += 1
