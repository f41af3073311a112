"""Acceptance by depth and by child rank, compared with counting by the definition."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from swiftspec.messages import NodeSource
from swiftspec.observe.acceptance_stats import Acceptance
from swiftspec.tree.acceptance import match_path
from tests.support.proposals import LOOKUP


def test_one_round_by_hand() -> None:
    counts = Acceptance()
    #    0: root;  1, 2, 3 below it;  4, 5 below 2;  6 below 5
    parents = (-1, 0, 0, 0, 2, 2, 5)
    counts.add(parents, (0, 2, 5))  # second child, second child, then the only child is rejected
    assert counts.histogram == [0, 0, 1]
    assert (counts.tried_at_depth, counts.accepted_at_depth) == ([1, 1, 1], [1, 1])
    assert (counts.tried_child, counts.accepted_child) == ([3, 2, 1], [0, 2])
    counts.add((-1,), (0,))  # an autoregressive round: nothing was proposed
    assert counts.histogram == [1, 0, 1]
    assert counts.tried_at_depth == [1, 1, 1]
    assert counts.expected_rate is None
    counts.add((-1, 0, 1), (0, 1), (0.5, 0.25))
    counts.add((-1,), (0,))
    assert counts.expected_rate == 0.375


def test_each_node_counts_for_its_source() -> None:
    counts, model = Acceptance(), NodeSource.DRAFT_MODEL
    counts.add((-1, 0, 1, 0, 3), (0, 3, 4), (), (NodeSource.ROOT, model, model, model, LOOKUP))
    counts.add((-1, 0, 0), (0,), (), (NodeSource.ROOT, model, LOOKUP))
    counts.add((-1,), (0,), (), (NodeSource.ROOT,))
    assert counts.proposed_by_source == {model: 4, LOOKUP: 2} and counts.accepted_by_source == {model: 1, LOOKUP: 1}
    counts.add((-1, 0, 1), (0, 1))
    assert counts.proposed_by_source[model] == 6 and counts.accepted_by_source[model] == 2, "unless sources are given"


@settings(deadline=None)
@given(st.data())
def test_sums(data: st.DataObject) -> None:
    """Each accepted token counts once by depth and once by rank; attempts are never fewer."""
    counts, accepted = Acceptance(), 0
    rounds = data.draw(st.integers(1, 6))
    for _ in range(rounds):
        size = data.draw(st.integers(1, 9))
        parents = (-1, *(data.draw(st.integers(0, i - 1)) for i in range(1, size)))
        sampled = data.draw(st.lists(st.integers(0, size + 2), min_size=size, max_size=size))
        path, _ = match_path(range(size), parents, sampled)
        counts.add(parents, path)
        accepted += len(path) - 1
    assert sum(counts.histogram) == rounds
    assert counts.accepted_by_source.total() == accepted <= counts.proposed_by_source.total()
    assert sum(j * n for j, n in enumerate(counts.histogram)) == accepted
    for tried, taken in (
        (counts.tried_at_depth, counts.accepted_at_depth),
        (counts.tried_child, counts.accepted_child),
    ):
        assert sum(taken) == accepted and len(taken) <= len(tried)
        assert all(few <= many for few, many in zip(taken, tried, strict=False))
    for depth, taken in enumerate(counts.accepted_at_depth):
        assert taken == sum(counts.histogram[depth + 1 :])
