"""Runner with a prefix cache, so that only new tokens of a request are prefilled.

The states of the last request stay in the live cache at no cost. When a new request is about to overwrite much of
them, they are copied into the prefix cache, which has a budget in tokens and evicts the least recently used entry
first. Entries are matched by their tokens. The contents follow from the requests and their results alone, so all ranks
of a group hold the same entries, and the leader sends the number of cached tokens with each request. Several
requests at a time (batches, mode smc) have cache/sequence_prefixes.py instead.

Delta layers do not keep a state for every token. The caches of hybrids therefore take snapshots where later texts are
likely to branch off: at the end of each prompt, and where a prompt first differs from an earlier text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from swiftspec.cache.prefix_cache import (
    MIN_CACHED_TOKENS,
    CachedPrefix,
    PrefixCache,
    Tokens,
    TokenText,
    common_prefix_len,
)
from swiftspec.messages import RequestStart
from swiftspec.model.batch import HostBatch
from swiftspec.runtime.runner import Runner
from swiftspec.sampling.guidance import Guidance

TokenSequences = Sequence[Sequence[int]]


class PrefixCachingRunner(Runner):
    """A runner with a prefix cache: a request starts from its longest prefix in the live KV cache or the prefix cache.
    The two sequences of a guided request are cached separately."""

    def __init__(
        self, *args: Any, budget: int, min_tokens: int = MIN_CACHED_TOKENS, snapshot_tokens: int = 0, **kwargs: Any
    ) -> None:
        """As `Runner`.

        `budget`: size of the prefix cache in tokens; it is exceeded temporarily when the live cache is copied before an
        entry is evicted.
        `min_tokens`: shorter sequences are not copied into the prefix cache.
        `snapshot_tokens`: size of a snapshot in tokens (`ModelCache.num_snapshots`).
        """
        super().__init__(*args, **kwargs)
        self.prefix_cache, self._snapshot_tokens = PrefixCache(budget, min_tokens), snapshot_tokens
        self._sequences: list[list[int]] = []  # the verified tokens of each sequence
        self._branches: list[int] = []  # of each sequence: where its prompt first differs from an earlier text
        self._incomplete = False  # whether prefix slots were allocated whose KV is not computed yet

    def cached_lengths(self, texts: TokenSequences, max_cached: Sequence[int] | None = None) -> list[int]:
        """Returns what `match_prefix` would find, at most `max_cached_tokens`."""
        held, counts = self._live_tokens(), []
        for s, text in enumerate(texts):
            limit = len(text) - 1 if max_cached is None else max_cached[s] if s < len(max_cached) else 0
            if self.max_cached_tokens is not None:
                limit = min(limit, self.max_cached_tokens)
            wanted = np.array(text[:-1], np.int64)[:limit]
            live = {s: held[s]} if len(held) == len(texts) else self._storable(dict(enumerate(held)))
            found = [entry.reusable_len(wanted) for entry in self.prefix_cache.entries]
            found += [self.cache.reusable_len(at, common_prefix_len(each, wanted)) for at, each in live.items()]
            counts.append(max(found, default=0))
        return counts

    def open(
        self, tokens: Sequence[int], guidance: Guidance | None = None, max_cached: Sequence[int] | None = None
    ) -> int:
        cached = super().open(tokens, guidance, max_cached)
        if self._snapshot_tokens > 0:
            for sequence in range(len(self.cache.prefix_len)):
                self.cache.take_snapshot(sequence)
        return cached

    def match_prefix(self, texts: TokenSequences, max_cached: Sequence[int] | None) -> list[int]:
        held, counts = self._live_tokens(), self.cached_lengths(texts, max_cached)
        wanted = [np.array(text[:count], np.int64) for text, count in zip(texts, counts, strict=True)]
        same = len(held) == len(texts)  # otherwise the live cache is reallocated
        stays = [same and self._holds(s, held[s], each) for s, each in enumerate(wanted)]
        self._branches = [self._branch(np.array(text[:-1], np.int64), held) for text in texts]
        lost = [len(each) - (len(wanted[s]) if same and stays[s] else 0) for s, each in enumerate(held)]
        new = self._copy_out({s: each for s, each in enumerate(held) if lost[s] >= self.prefix_cache.min_tokens})
        sources = [None if stays[s] else self._find_source(each, new) for s, each in enumerate(wanted)]
        self._sequences = []  # if anything below fails, the live cache is in an unknown state
        self.prefix_cache.update(new, [(entry, len(wanted[s])) for s, entry in enumerate(sources) if entry is not None])
        if same:
            self.cache.drop_tree()
        else:
            self.cache.reset(len(texts))
        for s, entry in enumerate(sources):
            if entry is not None:
                self.cache.load_prefix(s, entry.states, counts[s])
                continue
            if not stays[s]:
                counts[s] = 0
            self.cache.set_prefix(s, counts[s])
        self._sequences, self._incomplete = [list(text) for text in texts], False
        return counts

    def _holds(self, sequence: int, held: Tokens, wanted: Tokens) -> bool:
        """Returns whether a sequence of the live cache, whose tokens are `held`, can become `wanted`."""
        shared = common_prefix_len(held, wanted)
        return shared == len(wanted) == self.cache.reusable_len(sequence, shared)

    def _branch(self, wanted: Tokens, held: Sequence[Tokens]) -> int:
        """Returns the length of the longest prefix that `wanted` shares with a known text."""
        known = [*held, *(entry.tokens for entry in self.prefix_cache.entries)]
        return max((common_prefix_len(each, wanted) for each in known), default=0)

    def _prefill_sequence(self, tokens: Sequence[int], sequence: int) -> None:
        first = self.cache.prefix_len[sequence]
        before = self._branches[sequence] - first if self._snapshot_tokens > 0 else 0
        if self.prefix_cache.min_tokens <= before < len(tokens):
            super()._prefill_sequence(tokens[:before], sequence)
            self.cache.take_snapshot(sequence)
            tokens = tokens[before:]
        super()._prefill_sequence(tokens, sequence)

    def observe(self, tokens: Sequence[int]) -> None:
        for text in self._sequences:
            text += tokens

    def reusable_texts(self) -> list[TokenText]:
        """Returns the texts whose prefixes `match_prefix` finds for the next request, if that has no guidance. They are
        not changed later. Of a hybrid only some prefixes can be reused, all of the returned text among them."""
        held = [] if self._incomplete else self._sequences
        texts = list[TokenText]()
        for s, (text, count) in enumerate(zip(held, self.cache.prefix_len)):
            live = text[: self.cache.reusable_len(s, min(count, len(text)))]
            # the live cache is reallocated for a request without guidance after one with guidance
            if len(held) == 1 or self.prefix_cache.fits(live, self._size(s, live)):
                texts.append(live)
        for entry in self.prefix_cache.entries:
            length = entry.saved_len(len(entry.tokens))
            texts.append(entry.tokens if length == len(entry.tokens) else entry.tokens[:length])
        return texts

    def chain_batch(self, tokens: Sequence[int]) -> HostBatch:
        self._incomplete = True
        return super().chain_batch(tokens)

    def _prefill_chunk(self, chunk: Tokens, sequence: int) -> None:
        self._incomplete = True
        super()._prefill_chunk(chunk, sequence)

    def record_step(self, began: float, rows: int, seconds: float | None = None) -> None:
        super().record_step(began, rows, seconds)
        self._incomplete = False

    def _live_tokens(self) -> list[Tokens]:
        """Returns for each sequence the leading tokens whose KV in the live cache is complete."""
        texts = [] if self._incomplete else self._sequences
        return [np.array(text[:count], np.int64) for text, count in zip(texts, self.cache.prefix_len)]

    def _copy_out(self, texts: dict[int, Tokens]) -> list[CachedPrefix]:
        """Copies live sequences into new entries, except those that do not fit the prefix cache or are in it already.

        `texts`: tokens by index of the sequence. If memory is exhausted, the prefix cache is emptied and nothing is
        copied; in a tensor-parallel group the error is raised.
        """
        copies = []
        try:
            for s, text in self._storable(texts).items():
                if not self.prefix_cache.contains(text):
                    states = self.cache.save_prefix(s, len(text))
                    saved_len = partial(self.cache.saved_len, states)
                    copies.append(CachedPrefix(text, states, saved_len, self._size(s, text)))
        except (MemoryError, RuntimeError):
            self.prefix_cache.entries = []
            if self.model.group is not None:  # other ranks may have their copies; the caches must not diverge
                raise
            return []
        return copies

    def _storable(self, texts: dict[int, Tokens]) -> dict[int, Tokens]:
        """Returns those of some live sequences, tokens by index of the sequence, that fit the prefix cache."""
        return {s: text for s, text in texts.items() if self.prefix_cache.fits(text, self._size(s, text))}

    def _size(self, sequence: int, text: TokenText) -> int:
        """Returns the size of a copy of a live sequence in tokens."""
        return len(text) + self._snapshot_tokens * self.cache.num_snapshots(sequence, len(text))

    def _find_source(self, wanted: Tokens, new: Sequence[CachedPrefix]) -> CachedPrefix | None:
        """Returns an entry that begins with the tokens `wanted`: one of `new`, or else the most recently used one. None
        if there is no such entry, or if `wanted` is empty."""
        every = (*new, *reversed(self.prefix_cache.entries))
        return next((entry for entry in every if entry.reusable_len(wanted) == len(wanted) > 0), None)


def with_cached_lengths(start: RequestStart, *runners: Runner, guided: bool = False) -> RequestStart:
    """Returns the request with `num_cached_tokens` set, per sequence, to the smallest number that any of the `runners`
    finds in its caches. A leader sends this request to its group. `guided`: whether the runners also run the
    unconditional sequence of a guided request."""
    guidance = Guidance.of(start.sampling, start.tokens, start.prompt_len) if guided else None
    texts = [start.tokens] if guidance is None else [start.tokens, guidance.tokens]
    found = [r.cached_lengths([text[r.first_token :] for text in texts], start.num_cached_tokens) for r in runners]
    return replace(start, num_cached_tokens=tuple(map(min, zip(*found, strict=True))))
