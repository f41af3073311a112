"""Proposals of given trees, for tests in which the weights do not matter; and a second source of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from hypothesis import strategies as st

from swiftspec.messages import DraftProbs, Proposal


class _OtherSource(IntEnum):
    LOOKUP = 99

    @property
    def label(self) -> str:
        return "lookup"


LOOKUP: Any = _OtherSource.LOOKUP  # a source that `NodeSource` does not have, whose nodes are deterministic


def draft_proposal(
    request: int, round_: int, prefix_len: int, tokens: Sequence[int], parents: Sequence[int],
    draft_probs: DraftProbs | None = None,
) -> Proposal:  # fmt: skip
    """A proposal of the draft model in which each node has a log-weight of 1 less than its parent."""
    weights = [0.0]
    for parent in parents[1:]:
        weights.append(weights[parent] - 1)
    return Proposal.from_draft_model(request, round_, prefix_len, tokens, parents, weights, draft_probs=draft_probs)


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    """Any valid proposal without draft distributions."""
    request, round_, prefix = (draw(st.integers(0, 2**31 - 1)) for _ in range(3))
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9))
    parents, weights = [-1], [0.0]
    for node in range(1, len(tokens)):
        parents.append(draw(st.integers(0, node - 1)))
        weights.append(draw(st.floats(width=32, max_value=weights[parents[node]], allow_infinity=False)))
    return Proposal.from_draft_model(request, round_, prefix, tokens, parents, weights)
