"""Format of the lines of a trace, in a file or as server-sent events. docs/reference/trace.md documents the fields.

A line may contain NumPy arrays, which `to_json` converts to lists when the line is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from swiftspec.params import SamplingParams

Record = dict[str, Any]
TRACE_VERSION = 1
LOGPROB_DIGITS = 5  # decimals of probabilities and log-probabilities


def trace_header(facts: Record) -> Record:
    """Returns the first line of a trace. `facts`: its fields except the version."""
    return {"swiftspec_trace": TRACE_VERSION, **facts}


def non_default_fields(sampling: SamplingParams) -> Record:
    """Returns the sampling parameters that differ from their defaults."""
    usual = SamplingParams()
    values = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    return {name: value for name, value in values.items() if value != getattr(usual, name)}


def to_json(value: Any) -> Any:
    """Converts an array to a list, as the `default` function of a JSON encoder. Raises TypeError on another object."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"object of type {type(value).__name__} is not JSON serialisable")
    if value.dtype.kind == "f":
        return np.round(value.astype(np.float64), LOGPROB_DIGITS).tolist()
    return value.astype(np.int64).tolist()


def tokens_in(line: Record) -> set[int]:
    """Returns all token ids in a line."""
    found = set(line.get("tokens", ()))
    found.update(line.get("begin", {}).get("prompt", ()), line.get("proposal", {}).get("tokens", ()))
    tree = line.get("draft", {}).get("tree")
    if tree is not None:
        found.update(tree["tokens"].tolist())
    return found


class TokenTexts:
    """Makes field `texts` of trace lines, so that each token's text is written once."""

    def __init__(self) -> None:
        self._given: set[int] = set()

    def new(self, line: Record, token_text: Callable[[int], str]) -> Record:
        """Returns field `texts` for the tokens that no earlier line contains; no field if there are none."""
        return self.of(tokens_in(line), token_text)

    def of(self, tokens: set[int], token_text: Callable[[int], str]) -> Record:
        """Like `new`, for a set of token ids instead of a line."""
        missing = sorted(tokens - self._given)
        self._given.update(missing)
        return {"texts": {str(token): token_text(token) for token in missing}} if missing else {}
