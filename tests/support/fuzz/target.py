"""One thing that is fed with hostile input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis.strategies import SearchStrategy


@dataclass(frozen=True)
class Target:
    """`run` takes what `strategy` draws and returns a short word for the outcome, such as `taken` or `refused`; it
    raises on anything that is not allowed."""

    name: str
    strategy: SearchStrategy[Any]
    run: Callable[[Any], str]
