"""Prefix cache: states of earlier requests, by their tokens, so that only new tokens are prefilled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_CACHED_TOKENS = 32  # shorter prefixes are prefilled again faster than they are copied
Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefix:
    """A token sequence with the states that the layers of a model have computed for it.

    `states`: what `ModelCache.save_prefix` has returned for all of `tokens`.
    """

    tokens: Tokens
    states: Sequence[Any]


class PrefixCache:
    """LRU cache of prefixes with at most `budget` tokens in total. Sequences of fewer than `min_tokens` tokens are not
    worth an entry. `entries`: the most recently used one is last."""

    def __init__(self, budget: int, min_tokens: int) -> None:
        self.budget, self.min_tokens = budget, min_tokens
        self.entries: list[CachedPrefix] = []

    @property
    def size(self) -> int:
        """Number of tokens of all entries."""
        return sum(len(entry.tokens) for entry in self.entries)

    def fits(self, text: Tokens) -> bool:
        """Returns whether a sequence has at least `min_tokens` and at most `budget` tokens."""
        return self.min_tokens <= len(text) <= self.budget

    def contains(self, text: Tokens) -> bool:
        """Returns whether an entry begins with this sequence."""
        return any(common_prefix_len(entry.tokens, text) == len(text) for entry in self.entries)

    def update(self, new: Sequence[CachedPrefix], used: Sequence[tuple[CachedPrefix, int]]) -> None:
        """Inserts the entries `new` and evicts old ones.

        `used`: pairs (entry, n), one for each entry, old or new, whose first n tokens are about to be copied into the
        live KV cache. These entries become the most recently used ones, but an entry with fewer than `min_tokens`
        further tokens is removed. Old entries that are prefixes of a new one are removed too, and finally the least
        recently used ones until the budget is met.
        """
        sources = [entry for entry, _ in used]
        gone = [entry for entry, count in used if len(entry.tokens) - count < self.min_tokens]
        rest = [
            old
            for old in self.entries
            if not any(common_prefix_len(n.tokens, old.tokens) == len(old.tokens) for n in new)
        ]
        order = [entry for entry in (*rest, *new) if entry not in sources] + list(dict.fromkeys(sources))
        self.entries = [entry for entry in order if entry not in gone]
        while self.size > self.budget:
            del self.entries[0]


def common_prefix_len(a: Tokens, b: Tokens) -> int:
    """Returns the number of leading tokens that two sequences share."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
