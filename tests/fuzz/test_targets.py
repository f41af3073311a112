"""A few hundred hostile inputs of each kind; `python -m tests.support.fuzz` draws on for as long as one likes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.fuzz import Target, attempt, files, messages, requests

EXAMPLES = 200
SLOW_TO_DRAW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


@pytest.mark.parametrize(
    "target", [*files.TARGETS, *messages.TARGETS, *requests.TARGETS], ids=lambda target: target.name
)
def test_each_is_taken_or_refused_in_a_line(target: Target) -> None:
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=max(EXAMPLES // target.cost, 1), deadline=None, derandomize=True, database=None,
        suppress_health_check=SLOW_TO_DRAW,
    )  # fmt: skip
    @given(st.data())
    def many(data: st.DataObject) -> None:
        outcomes[attempt(target, data.draw(target.strategy))] += 1

    many()
    if outcomes.total() >= EXAMPLES // 2 and target not in requests.TARGETS:
        assert set(outcomes) == {"taken", "refused"}, "examples of which all end in one way are of no use"
