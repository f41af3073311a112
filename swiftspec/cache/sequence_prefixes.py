"""Prefix reuse between the cache sequences of a scheduler, so that only new prompt tokens are prefilled.

A sequence keeps the KV of its last request until another request uses it. A new request starts from the longest prefix
that any sequence holds, including those of running requests, and copies the keys and values from there. This needs no
additional memory. The contents follow from the requests and their tokens alone, so all ranks of a group hold the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import numpy as np

from swiftspec.cache.model_cache import ModelCache, longest
from swiftspec.cache.prefix_cache import MIN_CACHED_TOKENS, Tokens, TokenText, common_prefix_len


class SequencePrefixes:
    """Record of the tokens whose KV the prefix of each cache sequence holds, the same in all `caches`. `enabled`: if
    False, every prompt is prefilled from its first token."""

    def __init__(self, caches: Sequence[ModelCache], enabled: bool = True) -> None:
        self._caches, self._enabled = caches, enabled
        sequences = len(caches[0].prefix_len)
        self._tokens: list[Tokens] = [np.array([], np.int64)] * sequences
        self._lru = [*range(sequences)]  # least recently used first

    def acquire(self, tokens: Sequence[int], in_use: Collection[int]) -> tuple[int, int]:
        """Selects a sequence for a prompt that is not in `in_use`, and fills its prefix with the longest prefix of the
        prompt that any sequence holds. Returns the sequence and the length of that prefix; the caller prefills the
        rest.

        `tokens`: the prompt. Its last token is never part of the prefix.
        `in_use`: sequences of running requests.
        """
        sequence, source, cached = self.select(tokens, in_use)
        for cache in self._caches:
            cache.set_prefix(sequence, cached, source)
        self._touch(source)
        self.set_prefix(sequence, tokens[:cached])
        return sequence, cached

    def select(self, tokens: Sequence[int], in_use: Collection[int]) -> tuple[int, int, int]:
        """Returns the sequence that `acquire` selects, the one that it copies the prefix from, and the length of that
        prefix. Parameters as there."""
        wanted = np.array(tokens[:-1], np.int64)
        shared = {each: self._shared_len(each, wanted) for each in self._lru}
        source = max(self._lru, key=lambda each: (shared[each], each not in in_use))
        sequence, cached = source, shared[source]
        if (
            source in in_use or len(self.cached(source)) - cached >= MIN_CACHED_TOKENS
        ):  # keep it: its text may be requested again
            sequence = next((each for each in self._lru if each not in (*in_use, source)), source)
        return sequence, source, cached

    def set_prefix(self, sequence: int, text: Sequence[int]) -> None:
        """Records that the prefix of a sequence begins with the tokens `text`."""
        self._tokens[sequence] = np.array(text if self._enabled else (), np.int64)
        self._touch(sequence)

    def reusable_texts(self) -> list[TokenText]:
        """Returns for each sequence the tokens that a prompt of another request can reuse. They are not changed
        later."""
        texts = [self.cached(sequence) for sequence in self._lru]
        return [text[: self._shared_len(each, text)] for each, text in zip(self._lru, texts)]

    def _shared_len(self, sequence: int, wanted: Tokens) -> int:
        """Returns the length of the longest prefix of `wanted` that a sequence holds and that can be the prefix of
        another text."""
        shared = common_prefix_len(self.cached(sequence), wanted)
        return longest(shared, [partial(cache.reusable_len, sequence) for cache in self._caches])

    def _touch(self, sequence: int) -> None:
        self._lru.remove(sequence)
        self._lru.append(sequence)

    def cached(self, sequence: int) -> Tokens:
        """Returns the recorded tokens whose KV a sequence still holds: an empty array after it was wiped."""
        return self._tokens[sequence][: min(cache.prefix_len[sequence] for cache in self._caches)]
