"""The monitor that reports a draft that is hardly ever right."""

from __future__ import annotations

from swiftspec.messages import NodeSource, VerifiedRound
from swiftspec.observe.draft_monitor import MIN_ROUNDS, DraftMonitor

MISS, HIT = VerifiedRound((-1, 0, 1), (0,)), VerifiedRound((-1, 0, 1), (0, 1))
CUT, ALONE = VerifiedRound((-1, 0, 1), (0,), is_cut=True), VerifiedRound((-1,), (0,))


def test_low_acceptance_is_reported_once() -> None:
    lines: list[str] = []
    monitor = DraftMonitor(lines.append)
    monitor.add_rounds([MISS] * (MIN_ROUNDS - 1) + [CUT, ALONE] * 50)
    assert not lines and not monitor.is_low
    for _ in range(2):
        monitor.add_rounds([MISS])
        assert monitor.is_low and len(lines) == 1
    assert lines[0].startswith(f"the draft is hardly ever right: 0 of {MIN_ROUNDS} rounds accepted one of its tokens")
    monitor.add_rounds([HIT] * 10)
    assert not monitor.is_low


def test_rounds_with_nodes_of_suffix_lookup_do_not_count() -> None:
    """A node that both propose has one source, and the acceptance of suffix lookup says nothing about the draft."""
    monitor = DraftMonitor()
    root, draft, suffix = NodeSource.ROOT, NodeSource.DRAFT_MODEL, NodeSource.SUFFIX
    for sources in ((root, draft, suffix), (root, suffix, suffix)):
        monitor.add_rounds([MISS._replace(sources=sources), HIT._replace(sources=sources)] * MIN_ROUNDS)
    assert (monitor.rounds, monitor.hits) == (0, 0)
    monitor.add_rounds([HIT._replace(sources=(root, draft, draft))])
    assert (monitor.rounds, monitor.hits) == (1, 1)


def test_a_draft_that_is_sometimes_right_is_not_reported() -> None:
    lines: list[str] = []
    DraftMonitor(lines.append).add_rounds(([MISS] * 9 + [HIT]) * 20)
    assert not lines
