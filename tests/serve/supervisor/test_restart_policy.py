"""When a process is started again: soon, then later, and not for ever."""

from swiftspec.serve.supervisor.restart_policy import CALM, MOST, WINDOW, Restarts


def test_the_first_is_at_once_and_the_next_ones_later() -> None:
    restarts = Restarts()
    assert [restarts.delay(0.0, 0.0) for _ in range(8)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_what_was_up_for_long_is_started_at_once() -> None:
    restarts = Restarts()
    assert [restarts.delay(0.0, seconds) for seconds in (0.0, 1.0, CALM - 1, CALM, 1.0)] == [0.0, 0.5, 1.0, 0.0, 0.5]


def test_too_many_in_a_while_are_too_many() -> None:
    restarts = Restarts()
    for time in range(MOST):
        assert restarts.delay(10.0 * time, CALM) == 0.0
    assert restarts.delay(WINDOW, CALM) is None
    assert restarts.delay(WINDOW + 1, CALM) == 0.0, "the first was longer ago"
    assert restarts.delay(WINDOW + 2, CALM) is None
