"""Prefix reuse between the cache sequences of a population, so that only new prompt tokens are prefilled.

A sequence keeps the KV of its last request until another request uses it. A new request starts from the longest prefix
that any sequence holds, including those of running requests, and copies the keys and values from there. This needs no
additional memory. The contents follow from the requests and their tokens alone, so all ranks of a group hold the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from swiftspec.runtime.kv_cache import KVCache
from swiftspec.runtime.prefix_cache import MIN_CACHED_TOKENS, Tokens, common_prefix_len


class SequencePrefixes:
    """The token prefixes whose KV the sequences of some caches hold. All caches are filled alike. With `enabled` False
    every prompt is prefilled from its first token."""

    def __init__(self, caches: Sequence[KVCache], enabled: bool = True) -> None:
        self._caches, self._enabled = caches, enabled
        sequences = len(caches[0].prefix_len)
        self._tokens: list[Tokens] = [np.array([], np.int64)] * sequences
        self._lru = [*range(sequences)]  # least recently used first

    def acquire(self, tokens: Sequence[int], busy: Collection[int]) -> tuple[int, int]:
        """Chooses a sequence for a prompt, none of the `busy` ones, and fills its prefix with the longest matching
        prefix of any sequence, excluding the prompt's last token. Returns the sequence and the length; the rest is to
        be prefilled."""
        wanted = np.array(tokens[:-1], np.int64)
        shared = {each: common_prefix_len(self._cached(each), wanted) for each in self._lru}
        source = max(self._lru, key=lambda each: (shared[each], each not in busy))
        sequence, count = source, shared[source]
        if (
            source in busy or len(self._cached(source)) - count >= MIN_CACHED_TOKENS
        ):  # keep it: its text may be requested again
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
        """Records the tokens that the prefix of a sequence starts with."""
        self._tokens[sequence] = np.array(text if self._enabled else (), np.int64)
        self._touch(sequence)

    def _touch(self, sequence: int) -> None:
        self._lru.remove(sequence)
        self._lru.append(sequence)

    def _cached(self, sequence: int) -> Tokens:
        """The recorded tokens that are still in the prefix; none after it was wiped."""
        return self._tokens[sequence][: self._caches[0].prefix_len[sequence]]
