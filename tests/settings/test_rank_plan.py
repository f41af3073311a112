"""The split of the ranks. Messages name only flags that were given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftspec.builder.rules import Choices, resolve_config
from swiftspec.errors import UserError
from swiftspec.settings.rank_plan import requested_ranks


def split_ranks(mode: str, ranks: int, target: int | None, draft: int | None) -> tuple[int, int]:
    given = {"mode": mode, "target_tp": target, "draft_tp": draft}
    chosen = {name: value for name, value in given.items() if value is not None}
    config = resolve_config(Choices(chosen, "draft", ranks), "draft")
    return config.target_tp, config.draft_tp


SIZES = st.none() | st.integers(-3, 9)


CASES = [(5, None, "--target-tp 5"), (None, 2, "--draft-tp 2"), (0, None, "--target-tp 0")]


@pytest.mark.parametrize(("target", "draft", "given_"), CASES)
def test_messages_name_only_given_flags(target: int | None, draft: int | None, given_: str) -> None:
    with pytest.raises(UserError) as caught:
        split_ranks("async", 2, target, draft)
    text = str(caught.value)
    assert given_ in text and "1..1" in text and "-3" not in text
    assert ("--draft-tp" in text) == (draft is not None)


@given(st.integers(2, 8), SIZES, SIZES)
def test_an_invalid_split_is_refused(ranks: int, target: int | None, draft: int | None) -> None:
    try:
        x, y = split_ranks("async", ranks, target, draft)
    except UserError:
        assert not any(
            x + y == ranks and target in (None, x) and draft in (None, y) for x in range(1, 9) for y in range(1, 9)
        )
        return
    assert x >= 1 and y >= 1 and x + y == ranks and target in (None, x) and draft in (None, y)


@pytest.mark.parametrize(
    ("mode", "target", "draft", "has_draft", "ranks"),
    [
        (None, None, None, True, 1), (None, 1, None, True, 1), (None, 2, None, True, 3), (None, 2, None, False, 2),
        (None, None, 2, True, 3), (None, 1, 1, True, 2), ("async", None, None, True, 1), ("async", 1, None, True, 2),
        ("async", 3, 2, True, 5), ("serial", 2, None, True, 2), ("ar", 4, None, False, 4), ("smc", 2, 2, True, 2),
        ("async", 1, 0, True, 1),
    ],
)  # fmt: skip
def test_the_number_of_ranks_follows_from_the_flags(
    mode: str | None, target: int | None, draft: int | None, has_draft: bool, ranks: int
) -> None:
    assert requested_ranks(mode, target, draft, has_draft=has_draft) == ranks
    if ranks > 1:  # and they support this split
        assert split_ranks(mode or ("async" if has_draft else "ar"), ranks, target, draft)[0] == (target or 1)


def test_one_gpu_is_one_rank_and_an_excessive_number_is_refused() -> None:
    assert requested_ranks("async", 1, None, has_draft=True, runs_on_gpu=lambda: True) == 1
    with pytest.raises(UserError, match="640 ranks exceed the limit of 64 per command: start them with torchrun"):
        requested_ranks("ar", 640, None, has_draft=False)
