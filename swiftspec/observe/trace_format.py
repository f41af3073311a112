"""The lines of a trace, which events are too; docs/reference/trace.md has them field by field. Arrays in a line stay so
until it is written: `to_json` makes lists of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from swiftspec.params import SamplingParams

Record = dict[str, Any]
TRACE_VERSION = 1
LOGPROB_DIGITS = 5  # behind the point of logarithms and probabilities


def trace_header(facts: Record) -> Record:
    """The first line."""
    return {"swiftspec_trace": TRACE_VERSION, **facts}


def non_default_fields(sampling: SamplingParams) -> Record:
    """The fields that are not at their defaults."""
    usual = SamplingParams()
    values = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    return {name: value for name, value in values.items() if value != getattr(usual, name)}


def to_json(value: Any) -> Any:
    """What JSON has in place of an array."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a line holds no {type(value).__name__}")
    if value.dtype.kind == "f":
        return np.round(value.astype(np.float64), LOGPROB_DIGITS).tolist()
    return value.astype(np.int64).tolist()


def tokens_in(line: Record) -> set[int]:
    """All the tokens that a line names."""
    found = set(line.get("tokens", ()))
    found.update(line.get("begin", {}).get("prompt", ()), line.get("proposal", {}).get("tokens", ()))
    tree = line.get("draft", {}).get("tree")
    if tree is not None:
        found.update(tree["tokens"].tolist())
    return found


class TokenTexts:
    """Which tokens' texts have been given by now."""

    def __init__(self) -> None:
        self._given: set[int] = set()

    def new(self, line: Record, token_text: Callable[[int], str]) -> Record:
        """What a line has to say of the tokens that none before it has named."""
        return self.of(tokens_in(line), token_text)

    def of(self, tokens: set[int], token_text: Callable[[int], str]) -> Record:
        """As `new`, of tokens."""
        missing = sorted(tokens - self._given)
        self._given.update(missing)
        return {"texts": {str(token): token_text(token) for token in missing}} if missing else {}
