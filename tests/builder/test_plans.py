"""The text of a pair is the same in every plan: mode, tree shape, drafter and prefix cache change its speed alone."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftspec.config import EngineConfig
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from tests.support.cases import examples
from tests.support.tiny_checkpoints import LONGROPE, make_pair

TRAINED = LONGROPE["original_max_position_embeddings"]
FAMILIES = ["phi3", "qwen3_5_text", "gemma3_text"]
PROMPTS = [[5, 17, 3, 29, 11, 8, 2, 30, 44, 1, 7, 9], [5, 17, 3, 29, 11, 8, 2, 30, 3, 3, 21, 50, 33, 4]]
SAMPLINGS = [
    SamplingParams(temperature=0, max_tokens=32, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=7, top_p=0.95, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=8, repetition_penalty=1.2, max_tokens=24, ignore_eos=True),
]
REQUESTS = [(PROMPTS[index % 2], sampling) for index, sampling in enumerate(SAMPLINGS)]  # with equal prefixes
PLANS = st.builds(
    EngineConfig,
    st.just("serial"),
    verify_batch=st.integers(1, 32),
    draft_leaves=st.integers(1, 8),
    draft_steps=st.integers(1, 8),
    drafter=st.sampled_from(["model", "suffix", "model+suffix"]),
) | st.builds(EngineConfig, st.just("serial"), draft_steps=st.integers(1, 6), max_num_seqs=st.integers(2, 3))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("pairs")
    return {family: make_pair(folder / family, family=family, tie=False) for family in FAMILIES}


def texts(pair: tuple[Path, Path], plan: EngineConfig, context: int, prefix_cache_memory: int) -> list[list[int]]:
    """The answers to REQUESTS, one after the other on one engine or in batches."""
    options: dict[str, Any] = {"dtype": torch.float64, "ops": "reference", "max_model_len": context}
    draft = None if plan.mode == "ar" or plan.drafts_without_model else pair[1]
    llm = LLMEngine(pair[0], draft, plan, prefix_cache_memory=prefix_cache_memory, **options)
    if plan.max_num_seqs > 1:
        prompts, samplings = zip(*REQUESTS, strict=True)
        answers = llm.generate_batch(prompts, samplings)
    else:
        answers = [llm.generate(*request) for request in REQUESTS]
    llm.close()
    return [answer.token_ids for answer in answers]


@pytest.mark.slow
@settings(max_examples=examples(8), derandomize=True)
@given(
    family=st.sampled_from(FAMILIES),
    plan=PLANS,
    context=st.sampled_from([TRAINED - 4, TRAINED, TRAINED + 1]),
    prefix_cache=st.sampled_from([0, 1]),
)
def test_the_text_does_not_depend_on_the_plan(
    pairs: dict[str, tuple[Path, Path]], family: str, plan: EngineConfig, context: int, prefix_cache: int
) -> None:
    assert texts(pairs[family], plan, context, prefix_cache) == plain(pairs[family], context)


@cache
def plain(pair: tuple[Path, Path], context: int) -> list[list[int]]:
    return texts(pair, EngineConfig("ar"), context, 0)


@pytest.mark.parametrize("context", [TRAINED, TRAINED + 1])
def test_longrope_factors_follow_the_context(pairs: dict[str, tuple[Path, Path]], context: int) -> None:
    """The tables have rows for the nodes of a tree, which do not count: a context of the trained length is short."""
    tables = []
    for plan in (EngineConfig("ar"), EngineConfig("serial", verify_batch=64)):
        llm = LLMEngine(pairs["phi3"][0], pairs["phi3"][1], plan, max_model_len=context, ops="reference")
        models = llm.roles.models
        assert models is not None
        for side in ("target", "draft")[: 1 if plan.mode == "ar" else 2]:
            model = models.load_side(side, plan, None, None).model
            tables.append(model.stack.attention[0].sin[:context])
        llm.close()
    first, *others = tables
    assert all(torch.equal(first, other) for other in others)
    factors = LONGROPE["short_factor" if context == TRAINED else "long_factor"]
    frequencies = [1e4 ** (-2 * pair / 6) / factor for pair, factor in enumerate(factors)]
    factor = models.options.checkpoints.config("target").spec.layer.attention.rope.attention_factor
    want = torch.tensor(frequencies, dtype=torch.float64).sin() * factor
    torch.testing.assert_close(first[1, 4:7], want, rtol=1e-5, atol=1e-6)
