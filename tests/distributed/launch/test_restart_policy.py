"""Delays and limits of restarts."""

from swiftspec.distributed.launch.supervised_process import (
    MAX_RESTARTS,
    RESTART_WINDOW_S,
    STABLE_AFTER_S,
    RestartPolicy,
)


def test_the_first_restart_is_immediate_and_later_ones_are_delayed() -> None:
    restarts = RestartPolicy()
    assert [restarts.next_delay(0.0, 0.0) for _ in range(8)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_a_process_that_was_up_for_long_is_restarted_immediately() -> None:
    restarts = RestartPolicy()
    assert [restarts.next_delay(0.0, seconds) for seconds in (0.0, 1.0, STABLE_AFTER_S - 1, STABLE_AFTER_S, 1.0)] == [
        0.0,
        0.5,
        1.0,
        0.0,
        0.5,
    ]


def test_the_number_of_restarts_within_a_window_is_limited() -> None:
    restarts = RestartPolicy()
    for time in range(MAX_RESTARTS):
        assert restarts.next_delay(10.0 * time, STABLE_AFTER_S) == 0.0
    assert restarts.next_delay(RESTART_WINDOW_S, STABLE_AFTER_S) is None
    assert restarts.next_delay(RESTART_WINDOW_S + 1, STABLE_AFTER_S) == 0.0, "the first was longer ago"
    assert restarts.next_delay(RESTART_WINDOW_S + 2, STABLE_AFTER_S) is None
