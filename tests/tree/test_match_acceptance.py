"""The measured acceptance of matches by their length."""

from __future__ import annotations

from swiftspec.tree.match_acceptance import MEMORY_NODES, PRIOR, MatchAcceptance


def test_the_assumed_acceptance_rises_with_the_length() -> None:
    table = MatchAcceptance(64).table
    assert len(table) == 65 and table[0] == 0 and abs(table[64] - PRIOR[-1]) < 1e-6
    assert all(table[1:] >= table[:-1])


def test_measured_nodes_replace_the_assumption_in_their_bucket_only() -> None:
    acceptance = MatchAcceptance(64)
    before = acceptance.table.copy()
    for i in range(1000):
        acceptance.add(5, 1.0, accepted=i % 10 == 0)
    assert abs(acceptance.table[4] - 0.1) < 0.02 and acceptance.table[4] == acceptance.table[7]
    assert acceptance.table[3] == before[3] and acceptance.table[8] == before[8]


def test_a_node_with_a_share_is_accepted_as_often_as_its_share_predicts() -> None:
    acceptance = MatchAcceptance(64)
    for i in range(1000):
        acceptance.add(40, 0.5, accepted=i % 2 == 0)
    assert abs(acceptance.table[40] - 1) < 0.05 and acceptance.table.max() <= 1


def test_old_measurements_fade() -> None:
    acceptance = MatchAcceptance(64)
    for accepted in (True, False):
        for _ in range(int(4 * MEMORY_NODES)):
            acceptance.add(2, 1.0, accepted=accepted)
    assert acceptance.table[2] < 0.1
