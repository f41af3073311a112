"""Parameters of tests of which the fast suite runs some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

import pytest
from hypothesis import settings

FULL_PROFILE = "full"  # hypothesis profile with all examples
T = TypeVar("T")


def fast_first(values: Iterable[Any], count: int, *, unpack: bool = False) -> list[Any]:
    """Returns the values for `parametrize`, all but the first `count` marked `slow`.

    `unpack`: each value is a tuple of values for several parameters.
    """
    each = iter(values)
    rest = ((value if unpack else (value,)) for value in each)
    return [*islice(each, count), *(pytest.param(*value, marks=pytest.mark.slow) for value in rest)]


def spread(values: Sequence[T], count: int) -> list[T]:
    """Returns at most `count` of the values, evenly spaced, with the first one."""
    taken = min(count, len(values))
    return [values[i * len(values) // taken] for i in range(taken)]


def examples(full: int) -> int:
    """Returns the number of examples of a property test: `full`, or a fifth of them with the profile `fast`."""
    return full if settings.get_current_profile_name() == FULL_PROFILE else max(full // 5, 4)
