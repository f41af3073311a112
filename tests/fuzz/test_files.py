"""A few hundred hostile files of each kind; `python -m tests.support.fuzz` draws on for as long as one likes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.fuzz import Target, attempt
from tests.support.fuzz.files import TARGETS

EXAMPLES = 200


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_each_is_taken_or_refused_in_a_line(target: Target) -> None:
    @settings(
        max_examples=max(EXAMPLES // target.cost, 1), deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(st.data())
    def many(data: st.DataObject) -> None:
        attempt(target, data.draw(target.strategy))

    many()
