"""The split of the ranks: what was not given is never named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftspec.errors import UserError
from swiftspec.serve.plan import split_ranks

SIZES = st.none() | st.integers(-3, 9)


CASES = [(5, None, "--target-tp 5"), (None, 2, "--draft-tp 2"), (0, None, "--target-tp 0")]


@pytest.mark.parametrize(("target", "draft", "given_"), CASES)
def test_only_what_was_given_is_named(target: int | None, draft: int | None, given_: str) -> None:
    with pytest.raises(UserError) as caught:
        split_ranks("async", 2, target, draft)
    text = str(caught.value)
    assert given_ in text and "1..1" in text and "-3" not in text
    assert ("--draft-tp" in text) == (draft is not None)


@given(st.integers(2, 8), SIZES, SIZES)
def test_a_split_fits_or_is_refused(ranks: int, target: int | None, draft: int | None) -> None:
    try:
        x, y = split_ranks("async", ranks, target, draft)
    except UserError:
        assert not any(
            x + y == ranks and target in (None, x) and draft in (None, y) for x in range(1, 9) for y in range(1, 9)
        )
        return
    assert x >= 1 and y >= 1 and x + y == ranks and target in (None, x) and draft in (None, y)
