"""Where a request ends, its statistics, and validation before the first forward."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftspec.config import EngineConfig
from swiftspec.engine import Stats
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.observe.acceptance_stats import Acceptance
from swiftspec.params import SamplingParams
from swiftspec.settings.rank_plan import acceptance_advice
from tests.support.cases import fast_first
from tests.support.roles import drafter_of
from tests.support.tiny_checkpoints import make_checkpoint

PROMPT = [5, 17, 3, 29]
FREE = SamplingParams(temperature=0, ignore_eos=True)
CONTEXT = 96


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, vocab=64, layers=2, dtype=torch.float64, seed=4)
    return path


@pytest.fixture(scope="module")
def llm(path: Path) -> LLMEngine:
    """Target and draft are the same model, so whole paths are accepted."""
    return LLMEngine(path, path, dtype=torch.float64, max_model_len=CONTEXT)


def longest(llm: LLMEngine) -> list[int]:
    return llm.generate(PROMPT, FREE).token_ids


def test_generation_stops_cleanly_at_the_end_of_the_context(llm: LLMEngine, path: Path) -> None:
    answer = llm.generate(PROMPT, FREE)
    assert len(answer.token_ids) == CONTEXT - len(PROMPT) and answer.finish_reason == "length"
    plain = LLMEngine(path, dtype=torch.float64, max_model_len=CONTEXT).generate(PROMPT, FREE)
    assert plain.token_ids == answer.token_ids


@pytest.mark.slow
@pytest.mark.parametrize(("bs", "w", "d"), fast_first([(8, 2, 16), (3, 1, 8), (4, 1, 8)], 1, unpack=True))
def test_a_deep_tree_is_limited_by_the_context(path: Path, bs: int, w: int, d: int) -> None:
    """A narrow tree of a draft that is always accepted extends far beyond the last token that fits."""
    context = 40
    llm = LLMEngine(path, path, EngineConfig("serial", bs, w, d), dtype=torch.float64, max_model_len=context)
    plain = LLMEngine(path, dtype=torch.float64, max_model_len=context)
    sure = SamplingParams(temperature=0.001, seed=1, ignore_eos=True)
    for length in range(4, 12):
        prompt = [(7 * i) % 60 for i in range(length)]
        answer = llm.generate(prompt, sure)
        assert answer.token_ids == plain.generate(prompt, sure).token_ids
        assert len(answer.token_ids) == context - length


@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT - 2, CONTEXT - 7])
def test_a_prompt_may_fill_the_context_except_one_token(llm: LLMEngine, length: int) -> None:
    answer = llm.generate([i % 60 for i in range(length)], FREE)
    assert len(answer.token_ids) == CONTEXT - length and answer.finish_reason == "length"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("budget", [1, 2, 3, 10, 40])
def test_max_tokens_is_exact(llm: LLMEngine, budget: int) -> None:
    answer = llm.generate(PROMPT, SamplingParams(temperature=0, ignore_eos=True, max_tokens=budget))
    assert answer.token_ids == longest(llm)[:budget] and answer.finish_reason == "length"


def test_the_first_stop_token_ends_the_text_and_stays(llm: LLMEngine) -> None:
    text = longest(llm)
    for token in set(text[:30]):
        answer = llm.generate(PROMPT, SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=(token,)))
        assert answer.token_ids == text[: text.index(token) + 1] and answer.finish_reason == "stop"


def test_the_end_token_of_the_model_stops_unless_ignored(llm: LLMEngine) -> None:
    text = longest(llm)
    bias = {llm.eos_token_ids[0]: 1000.0}
    stopped = llm.generate(PROMPT, SamplingParams(temperature=0, logit_bias=bias))
    assert stopped.token_ids == [llm.eos_token_ids[0]] and stopped.finish_reason == "stop"
    ignored = llm.generate(PROMPT, SamplingParams(temperature=0, logit_bias=bias, ignore_eos=True, max_tokens=9))
    assert ignored.token_ids == [llm.eos_token_ids[0]] * 9
    assert longest(llm) == text


def test_the_end_token_of_the_tokenizer_stops_too(llm: LLMEngine, path: Path, tmp_path: Path) -> None:
    text = longest(llm)
    folder = Path(shutil.copytree(path, tmp_path / "model"))
    names = {"eos_token": "<end>", "added_tokens_decoder": {str(text[5]): {"content": "<end>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    with_end = LLMEngine(folder, dtype=torch.float64, max_model_len=CONTEXT)
    assert with_end.eos_token_ids == (*llm.eos_token_ids, text[5])
    assert with_end.generate(PROMPT, SamplingParams(temperature=0)).token_ids == text[: text.index(text[5]) + 1]


def test_chunks_distinguish_draft_tokens_from_bonus_tokens(llm: LLMEngine) -> None:
    chunks = list(llm.stream(PROMPT, FREE))
    assert all(0 <= c.accepted <= len(c.token_ids) for c in chunks)
    assert all(c.accepted == len(c.token_ids) - 1 and c.finish_reason is None for c in chunks[:-1])
    assert max(c.accepted for c in chunks) >= 2 and chunks[-1].finish_reason == "length"


def assert_counts_only_output(stats: Stats) -> None:
    """tokens = rounds + accepted, also by round and by depth."""
    seen = Acceptance.from_rounds(stats.verified)
    assert stats.tokens == stats.rounds + stats.accepted and stats.accepted <= stats.drafted
    assert sum(seen.histogram) == stats.rounds
    assert sum(j * n for j, n in enumerate(seen.histogram)) == sum(seen.accepted_at_depth) == stats.accepted
    chances = [*seen.tried_at_depth, *[0] * len(seen.accepted_at_depth)]
    assert all(hits <= tried for hits, tried in zip(seen.accepted_at_depth, chances, strict=False))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("budget", [1, 2, 3, 7])
def test_acceptance_is_counted_for_output_tokens_only(llm: LLMEngine, budget: int) -> None:
    """At the token limit, at a stop token within a round, and after a cut by the caller."""
    text = longest(llm)
    limited = llm.generate(PROMPT, replace(FREE, max_tokens=budget)).stats
    assert limited.tokens == budget
    assert_counts_only_output(limited)
    stopped = llm.generate(PROMPT, replace(FREE, stop_token_ids=(text[budget],))).stats
    assert stopped.tokens == text.index(text[budget]) + 1 and stopped.finish_reason == "stop"
    assert_counts_only_output(stopped)
    whole = llm.generate(PROMPT, FREE).stats
    whole.keep_tokens(budget)
    assert (whole.tokens, whole.rounds, whole.accepted) == (limited.tokens, limited.rounds, limited.accepted)
    assert_counts_only_output(whole)
    whole.keep_tokens(0)
    assert (whole.tokens, whole.rounds, whole.accepted, whole.drafted) == (0, 0, 0, 0)


def test_the_statistics_are_consistent(llm: LLMEngine) -> None:
    answer = llm.generate(PROMPT, FREE)
    stats = answer.stats
    assert_counts_only_output(stats)
    assert stats.tokens == len(answer.token_ids) and stats.prompt_tokens == len(PROMPT)
    assert stats.target_busy_time > 0 and stats.draft_busy_time > 0
    assert stats.target_busy_time + stats.draft_busy_time <= stats.decode_time
    assert stats.prompt_time < stats.first_token_time <= stats.prompt_time + stats.decode_time


def test_a_stream_closed_midway_does_not_affect_the_next_request(llm: LLMEngine) -> None:
    text = longest(llm)
    stream = llm.stream([9, 9, 9], FREE)
    next(stream)
    stream.close()
    assert longest(llm) == text


def test_a_second_stream_ends_the_first(llm: LLMEngine) -> None:
    text = longest(llm)
    first = llm.stream([9, 9, 9], FREE)
    next(first)
    second = llm.stream(PROMPT, FREE)
    tokens = list(next(second).token_ids)
    with pytest.raises(UserError, match="ended by a later one"):
        next(first)
    first.close()
    for chunk in second:
        tokens += chunk.token_ids
    assert tokens == text


@pytest.mark.parametrize("after", fast_first([1, 3, 9, 2, 4, 5], 3))
def test_an_interrupt_inside_a_forward_does_not_affect_the_next_request(
    llm: LLMEngine, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    text, runner, calls = longest(llm), drafter_of(llm).runner, 0
    forward = runner.model.forward

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == after:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(runner.model, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPT, FREE)
    assert longest(llm) == text


@pytest.mark.sampled(3)
@pytest.mark.parametrize("after", [1, 2, 7])
@pytest.mark.parametrize("failure", [RuntimeError("out of memory"), MemoryError("no memory")])
def test_a_failing_draft_model_is_lost_without_changing_the_text(
    llm: LLMEngine, monkeypatch: pytest.MonkeyPatch, after: int, failure: Exception
) -> None:
    text, runner, calls = longest(llm), drafter_of(llm).runner, 0
    forward = runner.model.forward

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= after:
            raise failure
        return forward(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(runner.model, "forward", failing)
        answer = llm.generate(PROMPT, FREE)
    assert answer.token_ids == text and answer.stats.drafter_lost == str(failure)


def test_a_draft_whose_logits_overflow_costs_speed_only(llm: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    text, runner = longest(llm), drafter_of(llm).runner
    forward = runner.model.forward

    def overflowing(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if output.logits is not None:
            output.logits.fill_(float("nan"))
        return output

    monkeypatch.setattr(runner.model, "forward", overflowing)
    answer = llm.generate(PROMPT, FREE)
    assert answer.token_ids == text and answer.stats.rounds == len(text)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ([1] * CONTEXT, "does not fit the context of 96"),
        ([64], "outside 0..63"),
        ([-1], "outside 0..63"),
    ],
)
def test_bad_prompts_are_refused(llm: LLMEngine, prompt: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        llm.stream(prompt, FREE)


def test_a_bias_on_an_unknown_token_is_refused(llm: LLMEngine) -> None:
    with pytest.raises(UserError, match="logit_bias contains a token"):
        llm.stream(PROMPT, SamplingParams(logit_bias={64: 1.0}))


def test_the_mode_follows_from_the_models(path: Path) -> None:
    plain = LLMEngine(path, None, EngineConfig(draft_steps=4), dtype=torch.float64)
    assert plain.config.mode == "ar" and plain.generate(PROMPT, replace(FREE, max_tokens=3)).stats.drafted == 0
    assert LLMEngine(path, path, EngineConfig(draft_steps=4), dtype="float64").config.mode == "serial"


def test_invalid_engine_settings_are_refused(path: Path) -> None:
    with pytest.raises(UserError, match="not supported without a draft model"):
        LLMEngine(path, config=EngineConfig(mode="serial"))
    with pytest.raises(UserError, match=r"max_model_len must lie in 2\.\.512"):
        LLMEngine(path, max_model_len=513)
    with pytest.raises(UserError, match=f"the tokenizer has 70 tokens, but the LM head of {path} has only 64 rows"):
        LLMEngine(path, vocab_size=70)
    with pytest.raises(UserError, match="no such directory"):
        LLMEngine(path / "nowhere")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="device cuda: PyTorch finds no NVIDIA GPU"):
            LLMEngine(path, device="cuda")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"temperature": 1e-40}, "temperature"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"logit_bias": {1: 1e39}}, "logit_bias"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"seed": -1}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ("",)}, "stop string"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias"),
    ],
)
def test_invalid_sampling_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SamplingParams(**values)


def test_plans_report_different_sampling_of_draft_and_target() -> None:
    sampled, greedy = SamplingParams(), SamplingParams(temperature=0)
    assert "proposal coupled has a higher acceptance rate" in str(
        acceptance_advice(EngineConfig(proposal="top"), sampled)
    )
    assert "verify reject or proposal coupled" in str(acceptance_advice(EngineConfig(proposal="sample"), sampled))
    for plan in (EngineConfig(), EngineConfig(verify="reject"), EngineConfig(mode="ar", proposal="top")):
        assert acceptance_advice(plan, sampled) is None
    assert acceptance_advice(EngineConfig(proposal="top"), greedy) is None


@pytest.mark.parametrize("values", [{"mode": "magic"}, {"verify_batch": 0}, {"draft_leaves": 65}, {"calibration": 0.0}])
def test_plans_without_a_valid_tree_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(values))):
        EngineConfig(**values)
