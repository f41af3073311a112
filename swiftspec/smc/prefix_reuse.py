"""The texts that lie in the sequences of a population's caches, so that a prompt reads only what is new.

A sequence keeps its text when its request has left, until another one is read into it. A new request begins with the
longest prefix that any sequence has, one whose request is under way too, and takes its keys and values from there. This
needs no memory of its own. What lies where follows from the requests and their tokens alone, so the ranks of a group
have the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from swiftspec.runtime.kv_cache import KVCache
from swiftspec.runtime.prefix_cache import MIN_CACHED_TOKENS, Tokens, common_prefix_len


class SequencePrefixes:
    """What the sequences of some caches, which are filled alike, hold of texts. Without `enabled` every text is read from
    its beginning."""

    def __init__(self, caches: Sequence[KVCache], enabled: bool = True) -> None:
        self._caches, self._enabled = caches, enabled
        sequences = len(caches[0].prefix_len)
        self._tokens: list[Tokens] = [np.array([], np.int64)] * sequences
        self._lru = [*range(sequences)]  # the one that was used last at the end

    def acquire(self, tokens: Sequence[int], busy: Collection[int]) -> tuple[int, int]:
        """Chooses a sequence for a text, none of the `busy` ones, and has its prefix begin with as much of the text as
        is known anywhere, but for the last token. Returns the sequence and that length; the rest is to be read."""
        wanted = np.array(tokens[:-1], np.int64)
        shared = {each: common_prefix_len(self._cached(each), wanted) for each in self._lru}
        source = max(self._lru, key=lambda each: (shared[each], each not in busy))
        sequence, count = source, shared[source]
        if source in busy or len(self._cached(source)) - count >= MIN_CACHED_TOKENS:  # its text may be asked for again
            sequence = next((each for each in self._lru if each not in (*busy, source)), source)
        for cache in self._caches:
            if sequence != source:
                for part in (cache.k, cache.v):
                    part[:, sequence, :, :count] = part[:, source, :, :count]
            cache.prefix_len[sequence] = count
        self._touch(source)
        self.set_prefix(sequence, tokens[:count])
        return sequence, count

    def set_prefix(self, sequence: int, text: Sequence[int]) -> None:
        """The text that the prefix of a sequence begins with."""
        self._tokens[sequence] = np.array(text if self._enabled else (), np.int64)
        self._touch(sequence)

    def _touch(self, sequence: int) -> None:
        self._lru.remove(sequence)
        self._lru.append(sequence)

    def _cached(self, sequence: int) -> Tokens:
        """None of it any more where the prefix was wiped."""
        return self._tokens[sequence][: self._caches[0].prefix_len[sequence]]
