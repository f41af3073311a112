"""TargetMonitor."""

from __future__ import annotations

from swiftspec.serve.link.target_monitor import TargetMonitor


def test_changes_are_reported_once() -> None:
    answers = [None, "silent", "silent", "another model", None, None]
    remaining, reported = iter(answers), list[str | None]()
    monitor = TargetMonitor(lambda: next(remaining), reported.append)
    for _ in answers:
        monitor.check()
    assert reported == ["silent", "another model", None]


def test_a_closed_monitor_reports_nothing() -> None:
    reported = list[str | None]()
    monitor = TargetMonitor(lambda: "silent", reported.append)
    monitor.close()
    monitor.check()
    assert not reported
