"""Acceptance by depth and by child rank, compared with counting by the definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swiftspec.observe.acceptance_stats import Acceptance
from swiftspec.tree.acceptance import match_path


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
    assert sum(j * n for j, n in enumerate(counts.histogram)) == accepted
    for tried, taken in (
        (counts.tried_at_depth, counts.accepted_at_depth),
        (counts.tried_child, counts.accepted_child),
    ):
        assert sum(taken) == accepted and len(taken) <= len(tried)
        assert all(few <= many for few, many in zip(taken, tried, strict=False))
    for depth, taken in enumerate(counts.accepted_at_depth):
        assert taken == sum(counts.histogram[depth + 1 :])
