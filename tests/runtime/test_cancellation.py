"""A request that is cancelled during its prefill ends at the next chunk and leaves valid caches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.engine import TokenChunk
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from swiftspec.runtime.runner import PREFILL_CHUNK_TOKENS
from tests.support.cases import fast_first
from tests.support.tiny_checkpoints import make_checkpoint

LONG = [(5 * i + i // 7) % 60 for i in range(3 * PREFILL_CHUNK_TOKENS + 9)]  # four chunks of each model
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
WARM = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    for name, seed in (("target", 0), ("draft", 1)):
        make_checkpoint(folder / name, seed=seed, layers=1, dtype=torch.float64, max_position_embeddings=1024)
    return folder / "target", folder / "draft"


def make(pair: tuple[Path, Path], mode: str, cache_memory: int = 1) -> LLMEngine:
    few = PopulationConfig(particles=2, smc_draft_tokens=2)
    plan = EngineConfig(mode, population=few)
    return LLMEngine(
        pair[0], None if mode == "ar" else pair[1], plan, dtype=torch.float64, prefix_cache_memory=cache_memory
    )


def after(polls: int) -> tuple[Callable[[], bool], list[int]]:
    """A predicate that is True from its `count`-th call on, and its calls."""
    had: list[int] = []
    return lambda: had.append(1) or len(had) > polls, had


# every mode, and every mode without a prefix cache
CASES = [("ar", 1, 0), ("serial", 2, 1), ("smc", 2, 1), ("ar", 1, 1), ("serial", 2, 0), ("smc", 2, 0)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mode", "models", "cache_memory"), fast_first(CASES, 3, unpack=True))
def test_a_cancelled_prefill_ends_at_the_next_chunk(
    pair: tuple[Path, Path], mode: str, models: int, cache_memory: int
) -> None:
    params = WARM if mode == "smc" else GREEDY
    want = make(pair, mode, 0).generate(LONG, params).token_ids
    for polls in range(4 * models):
        llm, (cancelled, had) = make(pair, mode, cache_memory), after(polls)
        assert list(llm.stream(LONG, params, cancelled)) == [] and len(had) == polls + 1
        assert llm.generate(LONG, params).token_ids == want


def test_the_next_request_reuses_the_prefilled_chunks(pair: tuple[Path, Path]) -> None:
    llm, want = make(pair, "ar"), make(pair, "ar", 0).generate(LONG, GREEDY).token_ids
    for _ in range(3):
        assert list(llm.stream(LONG, GREEDY, after(1)[0])) == []
    assert llm.generate(LONG, GREEDY).token_ids == want
    assert llm.stats.cached_tokens == 3 * PREFILL_CHUNK_TOKENS


def test_cancellation_is_not_polled_after_the_prefill(pair: tuple[Path, Path]) -> None:
    llm, read = make(pair, "serial"), list[TokenChunk]()
    for chunk in llm.stream(LONG, GREEDY, lambda: bool(read)):
        read.append(chunk)
    assert sum(len(chunk.token_ids) for chunk in read) == 8 and read[-1].finish_reason == "length"


def test_a_cancellation_does_not_end_the_next_request(pair: tuple[Path, Path]) -> None:
    llm = make(pair, "ar")
    assert list(llm.stream(LONG, GREEDY, lambda: True)) == []
    assert len(llm.generate(LONG, GREEDY).token_ids) == 8
