"""Prefix cache: states of earlier requests, by their tokens, so that only new tokens are prefilled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_CACHED_TOKENS = 32  # shorter prefixes are prefilled again faster than they are copied
Tokens = NDArray[np.int64]
TokenText = Sequence[int] | Tokens


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefix:
    """A token sequence with the states that the layers of a model have computed for it.

    `states`: what `ModelCache.save_prefix` has returned for all of `tokens`.
    `saved_len`: largest number of tokens, at most its argument, of which these states can become the prefix of a text.
    `size`: memory in units of a token's states.
    """

    tokens: Tokens
    states: Sequence[Any]
    saved_len: Callable[[int], int]
    size: int

    def reusable_len(self, text: Tokens) -> int:
        """Returns the length of the longest prefix of `text` that the states can become."""
        return self.saved_len(common_prefix_len(self.tokens, text))


class PrefixCache:
    """LRU cache of prefixes with a total size of at most `budget` tokens. Sequences of fewer than `min_tokens` tokens
    are not worth an entry. `entries`: the most recently used one is last."""

    def __init__(self, budget: int, min_tokens: int) -> None:
        self.budget, self.min_tokens = budget, min_tokens
        self.entries: list[CachedPrefix] = []

    @property
    def size(self) -> int:
        """Size of all entries."""
        return sum(entry.size for entry in self.entries)

    def fits(self, text: TokenText, size: int) -> bool:
        """Returns whether a sequence has at least `min_tokens` tokens, and a size of at most `budget`."""
        return len(text) >= self.min_tokens and size <= self.budget

    def contains(self, text: Tokens) -> bool:
        """Returns whether an entry can become this sequence."""
        return any(entry.reusable_len(text) == len(text) for entry in self.entries)

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
    different = a[:length] != b[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length
