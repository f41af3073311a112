"""The pool of sequences of concurrent requests: what it reuses of earlier texts."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftspec.backends.reference import reference
from swiftspec.cache.kv import KVCache
from swiftspec.cache.model_cache import ModelCache, SequenceView
from swiftspec.runtime.coroutines import VERIFICATION, CallQueue
from swiftspec.runtime.sequence_runner import SequencePool

SLOTS = 400
TEXTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90)), min_size=1, max_size=3).map(
    lambda parts: [token for token, count in parts for _ in range(count)]
)


def pool_of(sequences: int, prefix_tokens: int) -> SequencePool:
    cache = ModelCache(KVCache(1, 1, 1, SLOTS, reference.make_slot_mover), sequences)
    runner: Any = SimpleNamespace(cache=cache)
    return SequencePool(runner, sequences, CallQueue(), VERIFICATION, prefix_tokens=prefix_tokens)


def begin(pool: SequencePool, text: Sequence[int]) -> tuple[SequenceView, int]:
    """Begins a request, whose keys are its tokens. Returns its view, and the number of cached tokens."""
    cache = pool.runner.cache
    sequence, cached = pool.take(text)
    assert cache.prefix_len[sequence] == cached < len(text)
    assert cache.kv.k[0, sequence, 0, :cached, 0].tolist() == list(text[:cached])
    view = SequenceView(cache)
    view.view([sequence])
    first = view.append_prefix(len(text) - 1 - cached)
    cache.kv.k[0, sequence, 0, first : len(text) - 1, 0] = torch.tensor(text[cached:-1], dtype=torch.float32)
    pool.record(view, [list(text)])
    return view, cached


@settings(deadline=None)
@given(st.lists(st.tuples(TEXTS, st.booleans()), max_size=10), st.sampled_from([0, 100, 1000]))
def test_what_is_reused_belongs_to_the_text(requests: Sequence[tuple[list[int], bool]], prefix_tokens: int) -> None:
    """A request that is marked True continues while the next ones begin."""
    pool, running = pool_of(2, prefix_tokens), list[SequenceView]()
    for text, goes_on in requests:
        view, cached = begin(pool, text)
        assert cached == 0 or prefix_tokens > 0
        assert pool.prefix_cache.size <= prefix_tokens
        running.append(view)
        while len(running) > (1 if goes_on else 0):
            pool.give_back(running.pop(0))


@pytest.mark.parametrize(("prefix_tokens", "found"), [(1000, 99), (0, 0)])
def test_more_conversations_than_sequences_keep_their_prefixes(prefix_tokens: int, found: int) -> None:
    pool = pool_of(2, prefix_tokens)
    for turn in range(2):
        for conversation in range(5):
            view, cached = begin(pool, [conversation] * 100 + [9] * turn)
            pool.give_back(view)
            assert cached == (found if turn else 0)
