"""Prefix reuse between the sequences of a batch: only new tokens are prefilled, and every text equals itself alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swiftspec.backends.reference import reference
from swiftspec.cache.kv import KVCache
from swiftspec.cache.model_cache import ModelCache
from swiftspec.cache.sequence_prefixes import SequencePrefixes
from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.engine import Completion
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from tests.support.tiny_checkpoints import make_pair

TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=80)
SMC = EngineConfig("smc", population=PopulationConfig(3, 3, 0.7, smc_groups=3))
TREES = EngineConfig("serial", draft_steps=3, max_num_seqs=3)


@given(st.lists(st.tuples(TEXTS, st.booleans()), max_size=12))
def test_cached_prefixes_equal_what_was_prefilled(requests: Sequence[tuple[list[int], bool]]) -> None:
    """A cache whose keys are the tokens: whatever stays or is copied belongs to the text. A request that is marked True
    continues."""
    cache = ModelCache(KVCache(1, 1, 1, 80, reference.make_slot_mover), 3)
    texts, busy = SequencePrefixes([cache]), list[int]()
    for text, goes_on in requests:
        sequence, cached = texts.acquire(text, busy)
        assert sequence not in busy and cached <= len(text) - 1
        assert cache.kv.k[0, sequence, 0, :cached, 0].tolist() == text[:cached]
        first = cache.append_prefix(len(text) - 1 - cached, sequence)
        cache.kv.k[0, sequence, 0, first : len(text) - 1, 0] = torch.tensor(text[cached:-1], dtype=torch.float32)
        texts.set_prefix(sequence, text[:-1])
        again = [texts.acquire(text, [*busy, sequence])[1]] if len(busy) < 2 else []
        assert again in ([], [len(text) - 1])
        busy = [*busy, sequence][-2:] if goes_on else busy


def test_the_least_recently_used_sequence_is_reused() -> None:
    cache = ModelCache(KVCache(1, 1, 1, 200, reference.make_slot_mover), 3)
    texts = SequencePrefixes([cache])

    def read(*tokens: int) -> tuple[int, int]:
        text = [token for token in tokens for _ in range(40)] + [0]
        sequence, cached = texts.acquire(text, ())
        cache.append_prefix(len(text) - 1 - cached, sequence)
        texts.set_prefix(sequence, text[:-1])
        return sequence, cached

    one, two, three = read(1, 2), read(3, 4), read(5)
    assert {one[0], two[0], three[0]} == {0, 1, 2}
    assert read(1, 2, 6) == (one[0], 80), "it goes on where it lies"
    assert read(3, 7) == (three[0], 40), "copied, since much of the other text would go: the last one used is not it"
    assert read(3, 4) == (two[0], 80)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), head_dim=16, intermediate_size=64)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plan", [SMC, TREES], ids=["smc", "trees"])
def test_a_batch_prefills_only_new_tokens(pair: tuple[Path, Path], plan: EngineConfig) -> None:
    """A shared prefix in one batch, the next turns of two texts, and an unknown text."""
    options: dict[str, Any] = {"max_model_len": 160, "dtype": torch.float64}
    engine, system = LLMEngine(*pair, plan, **options), [3 + i % 50 for i in range(40)]
    questions = [[*system, 7 + i] for i in range(3)]
    sampling = [SamplingParams(0.7, seed=i, max_tokens=24, ignore_eos=True) for i in range(3)]

    def ask(prompts: list[list[int]]) -> list[Completion]:
        found = engine.generate_batch(prompts, sampling)
        fresh = LLMEngine(*pair, plan, **options).generate_batch(prompts, sampling)
        assert [each.token_ids for each in found] == [each.token_ids for each in fresh]
        return found

    first = ask(questions)
    assert [each.stats.cached_tokens for each in first] == [0, 40, 40]
    turns = [[*questions[i], *first[i].token_ids, 9, 9] for i in (2, 0)]
    next_turn = ask([*turns, [60] * 50])
    least = len(questions[0]) + (
        12 if plan is TREES else 0
    )  # particles share their last tokens only once one is picked
    for each, turn in zip(next_turn, turns, strict=False):
        assert least - 1 <= each.stats.cached_tokens < len(turn)
    assert next_turn[2].stats.cached_tokens == 0
    forgetful = LLMEngine(*pair, plan, prefix_cache_memory=0, **options).generate_batch(questions, sampling)
    assert [(each.token_ids, each.stats.cached_tokens) for each in forgetful] == [(each.token_ids, 0) for each in first]
