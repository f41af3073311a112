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
from swiftspec.runtime.prefix_cache import LEAST, Tokens, common


class Texts:
    """What the sequences of some caches, which are filled alike, hold of texts. Without `keep` every text is read from
    its beginning."""

    def __init__(self, caches: Sequence[KVCache], keep: bool = True) -> None:
        self._caches, self._keep = caches, keep
        sequences = len(caches[0].prefix_len)
        self._held: list[Tokens] = [np.array([], np.int64)] * sequences
        self._rested = [*range(sequences)]  # the one that was used last at the end

    def begin(self, tokens: Sequence[int], busy: Collection[int]) -> tuple[int, int]:
        """Chooses a sequence for a text, none of the `busy` ones, and has its prefix begin with as much of the text as
        is known anywhere, but for the last token. Returns the sequence and that length; the rest is to be read."""
        wanted = np.array(tokens[:-1], np.int64)
        shared = {each: common(self._of(each), wanted) for each in self._rested}
        source = max(self._rested, key=lambda each: (shared[each], each not in busy))
        sequence, count = source, shared[source]
        if source in busy or len(self._of(source)) - count >= LEAST:  # its text may be asked for again
            sequence = next((each for each in self._rested if each not in (*busy, source)), source)
        for cache in self._caches:
            if sequence != source:
                for part in (cache.k, cache.v):
                    part[:, sequence, :, :count] = part[:, source, :, :count]
            cache.prefix_len[sequence] = count
        self._used(source)
        self.hold(sequence, tokens[:count])
        return sequence, count

    def hold(self, sequence: int, text: Sequence[int]) -> None:
        """The text that the prefix of a sequence begins with."""
        self._held[sequence] = np.array(text if self._keep else (), np.int64)
        self._used(sequence)

    def _used(self, sequence: int) -> None:
        self._rested.remove(sequence)
        self._rested.append(sequence)

    def _of(self, sequence: int) -> Tokens:
        """None of it any more where the prefix was wiped."""
        return self._held[sequence][: self._caches[0].prefix_len[sequence]]
