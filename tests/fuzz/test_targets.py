"""Hostile inputs of each kind: a few in the fast suite, 100 in the slow one.

`python -m tests.support.fuzz` runs for any length of time.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.fuzz import Target, attempt, files, http, hub, messages, requests, services

TARGETS = (*files.TARGETS, *messages.TARGETS, *requests.TARGETS, *services.TARGETS, *http.TARGETS, *hub.TARGETS)
SLOW_TO_DRAW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


def draw(target: Target, examples: int) -> Counter[str]:
    """The numbers of accepted and refused examples; the number of examples is divided by the cost of one."""
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=max(examples // target.cost, 1), deadline=None, derandomize=True, database=None,
        suppress_health_check=SLOW_TO_DRAW,
    )  # fmt: skip
    @given(st.data())
    def many(data: st.DataObject) -> None:
        outcomes[attempt(target, data.draw(target.strategy))] += 1

    many()
    return outcomes


@pytest.mark.sampled(8)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_each_input_is_accepted_or_refused_in_one_line(target: Target) -> None:
    assert draw(target, 5).total() > 0


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_hundred_inputs_of_each_target(target: Target) -> None:
    outcomes = draw(target, 100)
    if target not in requests.TARGETS:
        assert set(outcomes) == {"taken", "refused"}, "examples of which all end in one way are of no use"
