"""The demo models: their size, exactness, and the acceptance rate on files that neither model was trained on."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from transformers import AutoTokenizer

from bench.data.heldout import DEMO, read_prompts
from swiftspec.config import EngineConfig
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.formats import format_of
from swiftspec.model.formats.awq import Awq
from swiftspec.params import SamplingParams
from tests.support.roles import drafter_of, make_drafter, replace_roles

TARGET, DRAFT = DEMO / "target", DEMO / "draft"


@functools.cache
def prompts() -> list[list[int]]:
    return read_prompts(AutoTokenizer.from_pretrained(TARGET))


def tokens_per_round(llm: LLMEngine, temperature: float, count: int, length: int = 128) -> float:
    tokens = rounds = 0
    for prompt in prompts()[:count]:
        sampling = SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, seed=7)
        stats = llm.generate(prompt, sampling).stats
        tokens, rounds = tokens + stats.accepted + stats.rounds, rounds + stats.rounds
    return tokens / rounds


@functools.cache
def greedy_with_four_steps() -> float:
    llm = LLMEngine(TARGET, DRAFT, EngineConfig(draft_steps=4), dtype=torch.bfloat16)
    return tokens_per_round(llm, 0.0, len(prompts()))


def test_the_models_are_small_and_document_their_origin() -> None:
    assert sum(f.stat().st_size for folder in (TARGET, DRAFT) for f in folder.iterdir()) < 15e6
    provenance = json.loads((DEMO / "provenance.json").read_text())
    text = json.dumps(provenance)
    for what in ("sha256", "held", "seed", "steps", "loss", "licen"):
        assert what in text.lower(), f"the provenance says nothing of {what}"
    target, draft = read_config(TARGET), read_config(DRAFT)
    assert isinstance(format_of(target), Awq) and format_of(draft) is None
    assert target.spec.vocab_size == draft.spec.vocab_size == 4096 and draft.dtype == "bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0, max_tokens=32, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=32, ignore_eos=True, repetition_penalty=1.05),
    ],
    ids=["greedy", "sampled"],
)
def test_serial_equals_ar_token_by_token(sampling: SamplingParams) -> None:
    prompt = prompts()[0][-120:]
    plain = LLMEngine(TARGET, dtype=torch.float64).generate(prompt, sampling)
    tree = LLMEngine(TARGET, DRAFT, dtype=torch.float64).generate(prompt, sampling)
    assert tree.token_ids == plain.token_ids and tree.stats.rounds < plain.stats.rounds


@pytest.mark.slow
def test_the_tree_gives_at_least_2_7_tokens_per_round() -> None:
    assert greedy_with_four_steps() >= 2.7


@pytest.mark.long
def test_lookahead_expansion_keeps_most_of_the_tokens_per_round() -> None:
    """One round late, a tree contains slightly fewer accepted tokens (the paper loses 8 %). For a fixed d the rounds
    are those of two groups of ranks, so one process can count them."""
    llm, every = LLMEngine(TARGET, DRAFT, EngineConfig(draft_steps=8), dtype=torch.bfloat16), len(prompts())
    serial = tokens_per_round(llm, 0.0, every)
    replace_roles(llm, make_drafter(drafter_of(llm).runner, llm.config, ahead=True))
    ahead = tokens_per_round(llm, 0.0, every)
    print(f"serial {serial:.3f}, ahead {ahead:.3f} tokens a round: {ahead / serial:.1%}")
    assert 0.9 * serial <= ahead < serial  # measured: 0.914 with w = 4, 0.941 with w = 8


@pytest.mark.long
def test_coupled_noise_makes_sampling_nearly_as_predictable_as_greedy() -> None:
    """At temperature 1: at least 80 % of the (calibrated) greedy ratio, 1.2 times the uncoupled one."""
    coupled = LLMEngine(TARGET, DRAFT, EngineConfig(draft_steps=4), dtype=torch.bfloat16)
    uncoupled = LLMEngine(TARGET, DRAFT, EngineConfig(draft_steps=4, proposal="top"), dtype=torch.bfloat16)
    every = len(prompts())
    greedy, with_noise = greedy_with_four_steps(), tokens_per_round(coupled, 1.0, every)
    assert with_noise >= 0.8 * greedy
    assert with_noise >= 1.2 * tokens_per_round(uncoupled, 1.0, every)
