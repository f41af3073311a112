"""The lines of a trace, which events are too; docs/reference/trace.md has them field by field. Trees and arrays in a
line stay so until it is written: `plain` makes objects and lists of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftspec.params import SamplingParams

Record = dict[str, Any]
VERSION = 1
DIGITS = 5  # behind the point of logarithms and probabilities
FORBIDDEN = -9999.0  # in place of the logarithm of 0: a filter forbids this node


def head_of(facts: Record) -> Record:
    """The first line."""
    return {"swiftspec_trace": VERSION, **facts}


@dataclass(frozen=True, slots=True)
class Tree:
    """A draft tree as it stood. Made in the midst of a round, so it is no more than a copy of tree/tree.py's arrays;
    whoever has time asks for what it means."""

    token: NDArray[np.int64]
    parent: NDArray[np.int64]
    logprob: NDArray[np.float64]
    slot: NDArray[np.int64]
    slots: int

    @staticmethod
    def of(tree: Any) -> Tree:
        """A copy; the root is node 0."""
        n = tree.count
        token, parent, logprob, slot = tree.token[:n], tree.parent[:n], tree.logprob[:n], tree.slot[:n]
        return Tree(token.copy(), parent.copy(), logprob.copy(), slot.copy(), tree.slots)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """tokens, parents, logprobs and expanded, as a line has them."""
        parents = self.parent.astype(np.int32)
        parents[0] = -1
        logprobs = np.maximum(self.logprob, FORBIDDEN).astype(np.float32)
        tokens, expanded = self.token.astype(np.int32), self.slot != self.slots
        return {"tokens": tokens, "parents": parents, "logprobs": logprobs, "expanded": expanded}


def given(sampling: SamplingParams) -> Record:
    """The fields that are not at their defaults."""
    usual = SamplingParams()
    values = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    return {name: value for name, value in values.items() if value != getattr(usual, name)}


def plain(value: Any) -> Any:
    """What JSON has in place of an array."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a line holds no {type(value).__name__}")
    if value.dtype.kind == "f":
        return np.round(value.astype(np.float64), DIGITS).tolist()
    return value.astype(np.int64).tolist()


def opened(line: Record) -> Record:
    """A line as it is to be written, for whoever has time: its tree as arrays, and its draft's lane read, where that
    came from another process. One that makes no sense is left out."""
    lane: Any = line.get("draft")
    if lane is None:
        return line
    try:
        lane = lane() if callable(lane) else lane
    except ValueError:
        return {name: part for name, part in line.items() if name != "draft"}
    tree = lane.get("tree")
    return {**line, "draft": {**lane, "tree": tree.arrays()} if isinstance(tree, Tree) else lane}


def tokens_in(line: Record) -> set[int]:
    """All the tokens that an opened line names."""
    found = set(line.get("tokens", ()))
    found.update(line.get("begin", {}).get("prompt", ()), line.get("proposal", {}).get("tokens", ()))
    tree = line.get("draft", {}).get("tree")
    if tree is not None:
        found.update(tree["tokens"].tolist())
    return found


class Texts:
    """Which tokens' texts have been given by now."""

    def __init__(self) -> None:
        self._given: set[int] = set()

    def new(self, line: Record, spell: Callable[[int], str]) -> Record:
        """What a line has to say of the tokens that none before it has named."""
        return self.of(tokens_in(line), spell)

    def of(self, tokens: set[int], spell: Callable[[int], str]) -> Record:
        """As `new`, of tokens."""
        missing = sorted(tokens - self._given)
        self._given.update(missing)
        return {"texts": {str(token): spell(token) for token in missing}} if missing else {}
