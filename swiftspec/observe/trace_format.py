"""Format of the lines of a trace, in a file or as server-sent events. docs/reference/trace.md documents the fields.

A line may contain NumPy arrays, which `to_json` converts to lists when the line is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

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


class TokenText(NamedTuple):
    """What a trace contains about a token: its text; its bytes if they are not whole characters, else None; whether it
    is special, so that the text of an answer leaves it out."""

    text: str
    data: bytes | None = None
    special: bool = False


def text_fields(tokens: Mapping[int, TokenText]) -> Record:
    """Returns the fields `texts`, `bytes` and `special` of a line, of which empty ones are left out."""
    named = {
        "texts": {str(token): found.text for token, found in tokens.items()},
        "bytes": {str(token): found.data.hex() for token, found in tokens.items() if found.data is not None},
        "special": [token for token, found in tokens.items() if found.special],
    }
    return {name: value for name, value in named.items() if value}


class TokenTexts:
    """Makes the fields of `text_fields` for trace lines, so that each token is written once."""

    def __init__(self) -> None:
        self._given: set[int] = set()

    def new(self, line: Record, token_text: Callable[[int], TokenText]) -> Record:
        """Returns the fields for the tokens that no earlier line contains; no field if there are none."""
        missing = sorted(tokens_in(line) - self._given)
        self._given.update(missing)
        return text_fields({token: token_text(token) for token in missing})
