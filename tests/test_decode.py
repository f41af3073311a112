"""Invariant 1: every mode gives the target's own text, token by token, with the number of rounds of the algorithm."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from swiftspec.config import EngineConfig
from swiftspec.decode import decode
from swiftspec.errors import DrafterLost
from swiftspec.llm_engine import LLMEngine
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.observe.acceptance_stats import Acceptance
from swiftspec.params import SamplingParams
from swiftspec.runtime.drafter import Drafter
from swiftspec.runtime.fallback_drafter import FallbackDrafter
from tests.support import slow_reference
from tests.support.cases import fast_first
from tests.support.roles import drafter_of, make_drafter, replace_roles, request_start, verifier_of
from tests.support.tiny_checkpoints import FAMILIES, ROPES, make_checkpoint, make_pair

PROMPT = [5, 17, 3, 29, 11, 8, 2, 30]
TOKENS = 60
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=0.8,
    top_p=0.9,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    logit_bias={7: 1.5},
    seed=1234,
    max_tokens=TOKENS,
    ignore_eos=True,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft that often agrees with it: the same model with noise on its weights."""
    return make_pair(tmp_path_factory.mktemp("pair"))


def make_llm(target: Path, draft: Path | None = None, **plan: Any) -> LLMEngine:
    return LLMEngine(target, draft, EngineConfig(mode="serial" if draft else "ar", **plan), dtype=torch.float64)


@functools.cache
def plain_text(target: Path, temperature: float, count: int = TOKENS) -> list[int]:
    """The text of autoregressive decoding after PROMPT, greedy or sampled."""
    sampling = replace(SAMPLED if temperature else GREEDY, max_tokens=count)
    answer = make_llm(target).generate(PROMPT, sampling)
    assert answer.stats.rounds == count and answer.stats.drafted == 0
    return answer.token_ids


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "rope"), [*product(FAMILIES, ROPES)])
def test_ar_equals_transformers(tmp_path: Path, family: str, rope: str) -> None:
    tie = (FAMILIES.index(family) + [*ROPES].index(rope)) % 2 == 0  # with each family and with each rope
    model: Any = make_checkpoint(
        tmp_path, family=family, rope=ROPES[rope], tie=tie, vocab=72, layers=2, dtype=torch.float64, seed=6
    )
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        text = model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    ours = make_llm(tmp_path).generate(PROMPT, sampling)
    assert ours.token_ids == text[0, len(PROMPT) :].tolist() and ours.finish_reason == "length"
    assert len(set(ours.token_ids)) > 10, "a text that repeats itself would prove little"


SHAPES: dict[str, dict[str, Any]] = {
    "biases": {"attention_bias": True, "mlp_bias": True},
    "multi-head": {"num_key_value_heads": 4},
    "multi-query": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 16},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_ar_equals_transformers_for_every_shape_with_a_padded_vocabulary(tmp_path: Path, shape: str) -> None:
    model: Any = make_checkpoint(tmp_path, vocab=96, layers=2, dtype=torch.float64, seed=8, **SHAPES[shape])
    beyond = list(range(64, 96))
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "suppress_tokens": beyond}
    text = model.generate(torch.tensor([PROMPT]), max_new_tokens=60, **options)
    llm = LLMEngine(tmp_path, dtype=torch.float64, vocab_size=64)
    ours = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    assert ours.token_ids == text[0, len(PROMPT) :].tolist()
    free = LLMEngine(tmp_path, dtype=torch.float64).generate(PROMPT, SamplingParams(temperature=0, max_tokens=60))
    assert max(free.token_ids) >= 64, "the padded rows would have won somewhere"


def test_a_prompt_of_several_chunks(pair: tuple[Path, Path]) -> None:
    prompt = [(11 * i) % 63 for i in range(300)]
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    plain = make_llm(pair[0]).generate(prompt, sampling)
    assert make_llm(*pair).generate(prompt, sampling).token_ids == plain.token_ids


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"proposal": "top"},
        {"verify_batch": 3, "draft_leaves": 2, "draft_steps": 6},
        {"verify_batch": 16, "draft_leaves": 4, "draft_steps": 1},
        {"verify_batch": 1, "draft_leaves": 1, "draft_steps": 1},
    ],
    ids=["default", "uncoupled", "narrow", "wide", "root-only"],
)
def test_serial_equals_ar(pair: tuple[Path, Path], sampling: SamplingParams, plan: dict[str, Any]) -> None:
    plain = plain_text(pair[0], sampling.temperature)
    llm = make_llm(*pair, **plan)
    tree = llm.generate(PROMPT, sampling)
    assert tree.token_ids == plain and len(tree.token_ids) == TOKENS
    if llm.config.verify_batch > 1:
        assert tree.stats.rounds < 0.75 * TOKENS
    assert llm.generate(PROMPT, replace(sampling, max_tokens=30)).token_ids == plain[:30], (
        "a second request starts clean"
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_serial_equals_ar_with_an_unrelated_draft(tmp_path: Path, family: str) -> None:
    """Padded vocabularies of unequal sizes, and a draft whose tokens are mostly rejected."""
    make_checkpoint(tmp_path / "t", family=family, vocab=80, layers=2, dtype=torch.float64, seed=5)
    make_checkpoint(tmp_path / "d", family=family, vocab=72, layers=1, dtype=torch.float64, seed=6)
    for sampling in (replace(GREEDY, max_tokens=40), replace(SAMPLED, max_tokens=40)):
        plain = LLMEngine(tmp_path / "t", dtype=torch.float64, vocab_size=64).generate(PROMPT, sampling)
        tree = LLMEngine(tmp_path / "t", tmp_path / "d", dtype=torch.float64, vocab_size=64).generate(PROMPT, sampling)
        assert tree.token_ids == plain.token_ids and max(plain.token_ids) < 64


class Failing:
    """A drafter that is lost after some calls."""

    lost_reason = None

    def __init__(self, inner: Drafter, calls: int) -> None:
        self.inner, self.calls = inner, calls
        self.busy, self.draft_steps = 0.0, 0

    def _count(self) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise DrafterLost("the draft model left")

    def open(self, start: RequestStart) -> None:
        self._count()
        self.inner.open(start)

    def propose(self) -> Proposal:
        self._count()
        return self.inner.propose()

    def grow(self) -> None:
        self._count()
        self.inner.grow()

    def observe(self, result: VerifyResult) -> None:
        self._count()
        self.inner.observe(result)

    def close(self) -> None:
        self.inner.close()


FAILURES = [(calls, sampling) for sampling in (SAMPLED, GREEDY) for calls in (0, 1, 2, 3, 40)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("calls", "sampling"), fast_first(FAILURES, 5, unpack=True))
def test_a_drafter_that_fails_midway_changes_nothing(
    pair: tuple[Path, Path], sampling: SamplingParams, calls: int
) -> None:
    sampling = replace(sampling, max_tokens=50)
    plain = plain_text(pair[0], sampling.temperature)[:50]
    llm = make_llm(*pair)
    replace_roles(llm, Failing(drafter_of(llm), calls))
    answer = llm.generate(PROMPT, sampling)
    assert answer.token_ids == plain and answer.stats.drafter_lost == "the draft model left"
    replace_roles(llm)
    again = llm.generate(PROMPT, sampling)
    assert again.token_ids == plain and again.stats.drafter_lost is None
    assert again.stats.rounds < answer.stats.rounds


def test_both_roles_can_be_reopened_in_the_middle_of_a_text(pair: tuple[Path, Path]) -> None:
    """As after a failure: from the verified tokens, of which only some belong to the prompt."""
    plain = plain_text(pair[0], SAMPLED.temperature)
    llm = make_llm(*pair)
    drafter, verifier = FallbackDrafter(drafter_of(llm)), verifier_of(llm)
    middle = request_start([*PROMPT, *plain[:20]], SAMPLED, len(PROMPT), request=7)
    for role in (drafter, verifier):
        role.open(middle)
    tokens: list[int] = []
    for _, result in decode(drafter, verifier):
        tokens += result.tokens
        if len(tokens) >= 40:
            break
    assert tokens[:40] == plain[20:]


def logprobs(model: transformers.PreTrainedModel, temperature: float = 1.0) -> slow_reference.LogProbs:
    @functools.cache
    def of(context: tuple[int, ...]) -> list[float]:
        with torch.no_grad():
            return (model(torch.tensor([context])).logits[0, -1] / temperature).log_softmax(-1).tolist()

    return lambda context: of(tuple(context))


@pytest.mark.parametrize(("bs", "w", "d", "calibration"), fast_first([(4, 2, 3, 0.4), (8, 8, 4, 1.0)], 1, unpack=True))
def test_rounds_equal_the_reference_algorithm(
    pair: tuple[Path, Path], bs: int, w: int, d: int, calibration: float
) -> None:
    target, draft = (transformers.AutoModelForCausalLM.from_pretrained(p, dtype=torch.float64) for p in pair)
    draft_laws = logprobs(draft, calibration)
    text, count = slow_reference.rounds(logprobs(target), draft_laws, PROMPT, 40, bs=bs, w=w, d=d)
    llm = make_llm(*pair, verify_batch=bs, draft_leaves=w, draft_steps=d, calibration=calibration)
    ours = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    assert (ours.token_ids, ours.stats.rounds) == (text, count)
    assert count < 30


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ahead", fast_first([True, False], 1))
@pytest.mark.parametrize("shape", fast_first([{}, {"verify_batch": 3, "draft_leaves": 1, "draft_steps": 6}], 1))
def test_rejection_sampling_over_many_trees(pair: tuple[Path, Path], ahead: bool, shape: dict[str, Any]) -> None:
    """To the end of the text, with new trees in between; the same again for the same seed."""
    llm = make_llm(*pair, verify="reject", **shape)
    if ahead:
        replace_roles(llm, make_drafter(drafter_of(llm).runner, llm.config, ahead=True))
    sampling = replace(SAMPLED, max_tokens=50)
    first = llm.generate(PROMPT, sampling)
    assert len(first.token_ids) == 50 and llm.generate(PROMPT, sampling).token_ids == first.token_ids
    assert first.stats.rounds < 38
    seen = Acceptance.from_rounds(first.stats.verified)
    assert seen.judged == seen.tried_child[0] and seen.expected_rate is not None and 0 < seen.expected_rate < 1
    plainly = make_llm(*pair, **shape).generate(PROMPT, sampling)
    assert Acceptance.from_rounds(plainly.stats.verified).expected_rate is None
    replace_roles(llm, Failing(drafter_of(llm), 40))
    answer = llm.generate(PROMPT, sampling)
    assert len(answer.token_ids) == 50 and answer.stats.drafter_lost == "the draft model left"


def test_a_top_k_above_the_vocabulary_filters_nothing(pair: tuple[Path, Path]) -> None:
    sampling = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)
    wanted = make_llm(pair[0]).generate(PROMPT, sampling).token_ids
    assert make_llm(*pair).generate(PROMPT, replace(sampling, top_k=50_000)).token_ids == wanted


def test_sampled_children_with_coupled_verification(pair: tuple[Path, Path]) -> None:
    plain = plain_text(pair[0], SAMPLED.temperature)
    assert make_llm(*pair, proposal="sample").generate(PROMPT, SAMPLED).token_ids == plain
