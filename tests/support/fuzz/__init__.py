"""Hostile input for the real code, drawn by hypothesis.

A `Target` is a subject: a strategy for its input, and a function that hands this to the code and then goes on with what
was made of it. It may end well or in a UserError whose text is one line of bounded length. Anything else is a fault:
another exception, a crash, no end. `TARGETS` of each module here is a list of them.

    attempt(target, value)     "taken" or "refused"; raises whatever is a fault
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from swiftspec.errors import UserError

LONGEST = 600  # characters of a refusal


@dataclass(frozen=True, slots=True)
class Target:
    """`run(value, folder)` is given what was drawn and an empty folder, and returns "refused" where that is not said by
    a UserError. `cost`: of one run, the usual being 1."""

    name: str
    strategy: st.SearchStrategy[Any]
    run: Callable[[Any, Path], object]
    cost: int = 1


def attempt(target: Target, value: object) -> str:
    """One run. Raises AssertionError on a refusal that is no line for a person, and whatever `run` lets through."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return "refused" if target.run(value, Path(folder)) == "refused" else "taken"
        except UserError as error:
            text = str(error).replace(folder, "")
            assert 0 < len(text) <= LONGEST and text.isprintable(), text
            return "refused"
