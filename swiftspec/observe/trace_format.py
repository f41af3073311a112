"""The lines of a trace, which are also sent as events; docs/reference/trace.md documents the fields. Arrays in a line
are kept until it is written; `to_json` converts them to lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from swiftspec.params import SamplingParams

Record = dict[str, Any]
TRACE_VERSION = 1
LOGPROB_DIGITS = 5  # decimals of logarithms and probabilities


def trace_header(facts: Record) -> Record:
    """The first line."""
    return {"swiftspec_trace": TRACE_VERSION, **facts}


def non_default_fields(sampling: SamplingParams) -> Record:
    """The fields that differ from their defaults."""
    usual = SamplingParams()
    values = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    return {name: value for name, value in values.items() if value != getattr(usual, name)}


def to_json(value: Any) -> Any:
    """The JSON representation of an array."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a line holds no {type(value).__name__}")
    if value.dtype.kind == "f":
        return np.round(value.astype(np.float64), LOGPROB_DIGITS).tolist()
    return value.astype(np.int64).tolist()


def tokens_in(line: Record) -> set[int]:
    """All tokens that occur in a line."""
    found = set(line.get("tokens", ()))
    found.update(line.get("begin", {}).get("prompt", ()), line.get("proposal", {}).get("tokens", ()))
    tree = line.get("draft", {}).get("tree")
    if tree is not None:
        found.update(tree["tokens"].tolist())
    return found


class TokenTexts:
    """Tracks the tokens whose texts were already written."""

    def __init__(self) -> None:
        self._given: set[int] = set()

    def new(self, line: Record, token_text: Callable[[int], str]) -> Record:
        """The texts of the tokens that occur in this line for the first time."""
        return self.of(tokens_in(line), token_text)

    def of(self, tokens: set[int], token_text: Callable[[int], str]) -> Record:
        """As `new`, for a set of tokens."""
        missing = sorted(tokens - self._given)
        self._given.update(missing)
        return {"texts": {str(token): token_text(token) for token in missing}} if missing else {}
