"""Classifier-free guidance equals guided generation of transformers, with every tree, and costs nothing if it is
off."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from bench.baselines.engines import load_transformers
from bench.data.heldout import DEMO, read_prompts
from swiftspec.config import EngineConfig
from swiftspec.distributed.transport.codec import pack_message, unpack_request_start
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.messages import RequestStart
from swiftspec.observe.acceptance_stats import Acceptance
from swiftspec.params import SamplingParams
from swiftspec.sampling.guidance import Guidance, guided_logits
from tests.support.cases import fast_first
from tests.support.roles import verifier_of
from tests.support.tiny_checkpoints import make_pair

PROMPT = [5, 17, 3, 29, 11, 8, 2, 30]
LONG = [1 + (11 * i) % 62 for i in range(300)]  # without 0, which pads in transformers
NEGATIVE = (9, 4, 40)
SAMPLED = {
    "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.2, "logit_bias": {7: 1.5},
    "seed": 1234, "max_tokens": 80,
}  # fmt: skip
TREES: dict[str, dict[str, Any]] = {
    "serial": {},
    "narrow": {"verify_batch": 3, "draft_leaves": 1, "draft_steps": 6},
    "root-only": {"verify_batch": 1, "draft_leaves": 1, "draft_steps": 1},
}
Pair = tuple[Path, Path, Any]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target, a draft, and the target in transformers."""
    target, draft = make_pair(tmp_path_factory.mktemp("pair"))
    return target, draft, LlamaForCausalLM.from_pretrained(target, dtype=torch.float64)


def guided(scale: float, negative: Sequence[int] = NEGATIVE, **values: Any) -> SamplingParams:
    values = {"temperature": 0, "max_tokens": 40, "ignore_eos": True} | values
    return SamplingParams(guidance_scale=scale, negative_prompt_ids=tuple(negative), **values)


def transformers_text(model: Any, prompt: Sequence[int], scale: float, negative: Sequence[int], **options: Any) -> Any:
    """The greedy output of `generate`."""
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    if negative:
        options["negative_prompt_ids"] = torch.tensor([negative])
    with torch.no_grad():
        text = model.generate(torch.tensor([prompt]), guidance_scale=scale, **options)
    return text[0, len(prompt) :].tolist()


@pytest.mark.parametrize("scale", fast_first([1.5, 0.0, 0.5, 4.0], 1))
@pytest.mark.parametrize("negative", fast_first([LONG, NEGATIVE, ()], 1), ids=["long", "short", "none"])
def test_autoregressive_and_tree_decoding_equal_transformers(pair: Pair, negative: Sequence[int], scale: float) -> None:
    target, draft, model = pair
    want = transformers_text(model, PROMPT, scale, negative)
    sampling = guided(scale, negative)
    assert LLMEngine(target, dtype=torch.float64).generate(PROMPT, sampling).token_ids == want
    for plan in TREES.values():
        tree = LLMEngine(target, draft, EngineConfig(**plan), dtype=torch.float64).generate(PROMPT, sampling)
        assert tree.token_ids == want
        # at s = 0 the text follows from a prompt that the draft has not read
        assert tree.stats.rounds < 40 or plan.get("verify_batch") == 1 or scale == 0
    assert want != transformers_text(model, PROMPT, 1.0, ()) and len(set(want)) > 10


def test_a_prompt_of_several_chunks_and_float32(pair: Pair) -> None:
    target, draft, model = pair
    want = transformers_text(model, LONG, 2.0, NEGATIVE)
    for dtype in (torch.float64, torch.float32):
        tree = LLMEngine(target, draft, dtype=dtype)
        assert tree.generate(LONG, guided(2.0)).token_ids == want


def test_bias_comes_after_guidance_as_in_transformers(pair: Pair) -> None:
    target, draft, model = pair
    want = transformers_text(model, PROMPT, 2.0, NEGATIVE, sequence_bias=[[[7], 3.0], [[12], 4.0]])
    sampling = guided(2.0, logit_bias={7: 3.0, 12: 4.0})
    assert LLMEngine(target, draft, dtype=torch.float64).generate(PROMPT, sampling).token_ids == want
    assert want != transformers_text(model, PROMPT, 2.0, NEGATIVE)


def test_penalties_come_after_guidance(pair: Pair) -> None:
    """By the definition, from whole texts: guided logits, then penalties for the tokens of the conditional text."""
    target, draft, model = pair
    text, output = list(PROMPT), []
    for _ in range(25):
        with torch.no_grad():
            c, u = (model(torch.tensor([[*start, *output]])).logits[0, -1] for start in (PROMPT, NEGATIVE))
        logits = u + 2 * (c - u)
        for token in set(text):
            logits[token] = logits[token] / 1.3 if logits[token] > 0 else logits[token] * 1.3
        for token in output:
            logits[token] -= 0.5
        output.append(int(logits.argmax()))
        text.append(output[-1])
    sampling = guided(2.0, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=25)
    assert LLMEngine(target, draft, dtype=torch.float64).generate(PROMPT, sampling).token_ids == output


@pytest.mark.slow
@pytest.mark.parametrize("scale", fast_first([2.0, 0.7], 1))
def test_sampled_trees_equal_autoregressive_decoding(pair: Pair, scale: float) -> None:
    target, draft, _ = pair
    sampling = guided(scale, **SAMPLED)
    plain = LLMEngine(target, dtype=torch.float64).generate(PROMPT, sampling).token_ids
    assert plain != LLMEngine(target, dtype=torch.float64).generate(PROMPT, guided(1.0, **SAMPLED)).token_ids
    for plan in TREES.values():
        llm = LLMEngine(target, draft, EngineConfig(**plan), dtype=torch.float64)
        assert llm.generate(PROMPT, sampling).token_ids == plain


def test_scale_1_disables_guidance_and_is_free(pair: Pair) -> None:
    target, draft, _ = pair
    llm = LLMEngine(target, draft, dtype=torch.float64, prefix_cache_memory=0)
    runner = verifier_of(llm).runner
    cache, rows, forward = runner.cache, [], runner.model.forward

    def count(batch: Any, cache: Any, *, head: bool = True) -> Any:
        rows.append((len(batch), cache.kv.k.shape[1]))
        return forward(batch, cache, head=head)

    runner.model.forward = count  # type: ignore[method-assign]
    want = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)).token_ids
    plain = list(rows)
    llm.generate(PROMPT, guided(2.0))
    assert (16, 2) in rows, "both sequences in one batch"
    rows.clear()
    assert llm.generate(PROMPT, guided(1.0)).token_ids == want
    assert rows == plain and cache.kv.k.shape[1] == 1, "the second buffer is given back"


def test_rejection_uses_the_guided_distribution(pair: Pair) -> None:
    """Target and draft are the same model: at scale 1 q equals p, and every first child is accepted; guided, p
    differs."""
    values = {"temperature": 0.8, "seed": 5, "max_tokens": 60}
    llm = LLMEngine(pair[0], pair[0], EngineConfig(verify="reject"), dtype=torch.float64)
    free = Acceptance.from_rounds(llm.generate(PROMPT, guided(1.0, **values)).stats.verified)
    assert free.expected_rate == pytest.approx(1, abs=1e-6) and free.accepted_child[0] == free.tried_child[0]
    away = Acceptance.from_rounds(llm.generate(PROMPT, guided(3.0, **values)).stats.verified)
    assert away.expected_rate is not None and away.expected_rate < 0.9


def test_the_context_limits_the_longer_text(pair: Pair) -> None:
    llm = LLMEngine(*pair[:2], dtype=torch.float64, max_model_len=64)
    answer = llm.generate(PROMPT, guided(2.0, LONG[:50], max_tokens=None))
    assert len(answer.token_ids) == 14 and answer.finish_reason == "length"
    with pytest.raises(UserError, match="the negative prompt of 64 tokens does not fit the context of 64"):
        llm.generate(PROMPT, guided(2.0, LONG[:64]))
    with pytest.raises(UserError, match=r"the negative prompt contains a token outside 0\.\.63"):
        llm.generate(PROMPT, guided(2.0, [64]))


def test_a_failed_allocation_for_the_negative_prompt_ends_one_request(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, pages = LLMEngine(pair[0], dtype=torch.float64), mmap.mmap
    one = verifier_of(llm).runner.cache.kv.k.nbytes

    def scarce(file: int, size: int, **kind: int) -> mmap.mmap:
        if size > one:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return pages(file, size, **kind)

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", scarce)
        with pytest.raises(UserError, match="not enough memory for this request"):
            llm.generate(PROMPT, guided(2.0))
        assert len(llm.generate(PROMPT, guided(1.0)).token_ids) == 40
    assert len(llm.generate(PROMPT, guided(2.0)).token_ids) == 40


@pytest.mark.parametrize("scale", [-0.1, float("nan"), float("inf"), 101.0])
def test_invalid_scales_are_refused(scale: float) -> None:
    with pytest.raises(UserError, match="guidance_scale must"):
        SamplingParams(guidance_scale=scale)


def test_guidance_works_with_a_draft_group() -> None:
    start = RequestStart(3, (1, 2, 3), guided(1.7, LONG), 2)
    assert unpack_request_start(pack_message(start)) == start
    guidance = Guidance.of(start.sampling, start.tokens, start.prompt_len)
    assert guidance == Guidance((*LONG, 3), 1.7)


def test_guiding_logits_or_log_probabilities_gives_the_same_distribution() -> None:
    """transformers takes log_softmax of both rows first, which adds a constant to each."""
    rows = 5 * torch.randn(8, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, theirs = guided_logits(rows, 2.5), guided_logits(rows.log_softmax(-1), 2.5)
    torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1))
    difference = ours - theirs
    assert difference.std(-1).max() < 1e-12 and difference.abs().min() > 1


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.5, 3.0])
def test_the_demo_models_equal_transformers(scale: float) -> None:
    prompt, negative = (text[-60:] for text in read_prompts(AutoTokenizer.from_pretrained(DEMO / "target"))[:2])
    want = transformers_text(load_transformers(DEMO / "target", torch.float64), prompt, scale, negative)
    answer = LLMEngine(DEMO / "target", DEMO / "draft", dtype=torch.float64).generate(prompt, guided(scale, negative))
    assert answer.token_ids == want and answer.stats.rounds < 30
