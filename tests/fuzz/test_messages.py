"""Whatever arrives between ranks is taken or refused, and nothing else comes of it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings

from tests.support.fuzz.messages import TARGETS
from tests.support.fuzz.target import Target

SLOW_TO_DRAW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_hostile_messages(target: Target) -> None:
    outcomes: Counter[str] = Counter()

    @settings(deadline=None, derandomize=True, max_examples=250, suppress_health_check=SLOW_TO_DRAW)
    @given(target.strategy)
    def run(drawn: object) -> None:
        outcomes[target.run(drawn)] += 1

    run()
    assert set(outcomes) == {"taken", "refused"}, "both happen, or the examples are of no use"
