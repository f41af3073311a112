"""Prefix cache: after any earlier requests, an answer and all its KV equal those of a fresh prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from swiftspec import _C
from swiftspec.cache.delta import DeltaCache
from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.errors import NonFiniteLogits
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from swiftspec.runtime.prefix_caching import PrefixCachingRunner, with_cached_lengths
from swiftspec.runtime.runner import PREFILL_CHUNK_TOKENS
from tests.support.roles import drafter_of, request_start, scheduler_of, verifier_of
from tests.support.tiny_checkpoints import make_checkpoint, make_pair

VOCAB, CONTEXT = 40, 160
MIN_TOKENS = 4
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
WARM = replace(GREEDY, temperature=0.9, seed=3)
PENALISED = replace(WARM, repetition_penalty=1.3, presence_penalty=0.4, logit_bias={3: 1.0})
GUIDED = replace(GREEDY, guidance_scale=2.0, negative_prompt_ids=(7, 30, 12))
LONG = replace(GUIDED, negative_prompt_ids=tuple(range(1, 31)))
A, B = list(range(1, 31)), [3, 9, *range(2, 35)]
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target, and a draft that is often right."""
    return make_pair(tmp_path_factory.mktemp("pair"), vocab=VOCAB, seed=3)


def make(pair: Pair, mode: str = "serial", cache_memory: int = 1, **config: Any) -> LLMEngine:
    draft = None if mode == "ar" else pair[1]
    plan = EngineConfig(mode, **config)
    return LLMEngine(pair[0], draft, plan, dtype=torch.float64, max_model_len=CONTEXT, prefix_cache_memory=cache_memory)


def runners(llm: LLMEngine) -> list[PrefixCachingRunner]:
    if llm.config.mode == "smc":
        both: list[Any] = [scheduler_of(llm).target, scheduler_of(llm).draft]
    else:
        both = [verifier_of(llm).runner, *([] if llm.config.mode == "ar" else [drafter_of(llm).runner])]
    assert all(isinstance(runner, PrefixCachingRunner) for runner in both)
    return both


def set_budget(llm: LLMEngine, budget: int, min_tokens: int = MIN_TOKENS) -> LLMEngine:
    """Sets another budget of tokens."""
    for runner in runners(llm):
        runner.prefix_cache.budget, runner.prefix_cache.min_tokens = budget, min_tokens
    return llm


def ask(llm: LLMEngine, prompt: Sequence[int], sampling: SamplingParams, rounds: int | None = None) -> list[int]:
    """The answer's tokens; stopped after `rounds` rounds."""
    tokens, stream = list[int](), llm.stream(prompt, sampling)
    for count, chunk in enumerate(stream, 1):
        tokens += chunk.token_ids
        if count == rounds:
            stream.close()
    return tokens


class Requests(RuleBasedStateMachine):
    """Successive requests, most of which continue an earlier text or a part of it."""

    pair: Pair
    makers: ClassVar[dict[str, LLMEngine]] = {}
    first_text: ClassVar[list[int]] = A

    def __init__(self) -> None:
        super().__init__()
        if not self.makers:
            self.makers.update({"keeps": make(self.pair), "reads": make(self.pair, cache_memory=0)})
        self.caching, self.fresh = self.makers["keeps"], self.makers["reads"]
        for runner in runners(self.caching):
            runner.prefix_cache.entries, runner._sequences = [], []
        self.texts = [self.first_text]

    @rule(budget=st.sampled_from([0, 30, 60, 100, 1000]))
    def give(self, budget: int) -> None:
        set_budget(self.caching, budget * (1 + runners(self.caching)[0]._snapshot_tokens // 20))
        for runner in runners(self.caching):
            runner.prefix_cache.update([], [])

    @rule(
        data=st.data(), sampling=st.sampled_from([GREEDY, GREEDY, WARM, PENALISED, GUIDED, LONG]),
        rounds=st.sampled_from([None, None, 1, 2]),
    )  # fmt: skip
    def ask(self, data: st.DataObject, sampling: SamplingParams, rounds: int | None) -> None:
        before = data.draw(st.sampled_from(self.texts))
        length = data.draw(st.sampled_from([len(before), len(before) - 1]) | st.integers(0, len(before)))
        new = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6))
        prompt = [*before[:length], *new][: CONTEXT - 40]
        found = runners(self.caching)[0].cached_lengths([prompt] if not sampling.guided else [prompt, new])
        answer = ask(self.caching, prompt, sampling, rounds)
        assert self.caching.stats.cached_tokens == found[0] < len(prompt)
        assert answer == ask(self.fresh, prompt, sampling, rounds)
        self.same_cache()
        self.texts.append(prompt + answer)

    def same_cache(self) -> None:
        """Compares the KV under the text, in both models and every sequence."""
        for ours, theirs in zip(runners(self.caching), every(self.fresh), strict=True):
            assert ours.cache.prefix_len == theirs.cache.prefix_len
            for s, count in enumerate(ours.cache.prefix_len):
                for mine, fresh in ((ours.cache.kv.k, theirs.cache.kv.k), (ours.cache.kv.v, theirs.cache.kv.v)):
                    torch.testing.assert_close(mine[:, s, :, :count], fresh[:, s, :, :count], atol=1e-9, rtol=1e-9)
                if ours.cache.delta is not None:
                    same_delta(ours.cache.delta, theirs.cache.delta, s, count)

    @invariant()
    def within_the_budget(self) -> None:
        for runner in runners(self.caching):
            copies = runner.prefix_cache.entries
            assert sum(copy.size for copy in copies) == runner.prefix_cache.size <= runner.prefix_cache.budget
            for copy in copies:
                (k, v), *delta = copy.states
                assert k.shape == v.shape and k.shape[2] == len(copy.tokens) <= copy.size
                assert copy.size - len(copy.tokens) == runner._snapshot_tokens * sum(map(len, delta))


def same_delta(ours: DeltaCache, theirs: DeltaCache, sequence: int, count: int) -> None:
    """Compares the folded states and the slots after them."""
    folded = int(ours.folded[sequence])
    assert folded == theirs.folded[sequence]
    pairs = [(ours.state[:, sequence], theirs.state[:, sequence])]
    for mine, fresh in zip(ours._slot_buffers(), theirs._slot_buffers(), strict=True):
        pairs.append((mine[:, sequence, : count - folded], fresh[:, sequence, : count - folded]))
    for mine, fresh in pairs:
        torch.testing.assert_close(mine, fresh, atol=1e-9, rtol=1e-9)


class HybridRequests(Requests):
    """With delta layers, and texts that are longer than a fold."""

    first_text: ClassVar[list[int]] = [(7 * i * i + i) % VOCAB for i in range(75)]


def every(llm: LLMEngine) -> list[Any]:
    return [verifier_of(llm).runner, drafter_of(llm).runner]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("hybrid"), vocab=VOCAB, family="qwen3_5_text")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "examples", [2, pytest.param(12, marks=pytest.mark.slow), pytest.param(160, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("machine", [Requests, HybridRequests])
def test_random_sequences_of_requests(pair: Pair, hybrid: Pair, machine: type[Requests], examples: int) -> None:
    machine.pair = pair if machine is Requests else hybrid
    machine.makers = {}
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=examples, stateful_step_count=10, deadline=None, suppress_health_check=checks),
    )


PLANS: dict[str, dict[str, Any]] = {
    "ar": {"mode": "ar"},
    "serial": {"mode": "serial"},
    "reject": {"mode": "serial", "verify": "reject"},
    "smc": {"mode": "smc", "population": PopulationConfig(3, 2)},
}


def conversation(answer: Callable[[list[int], SamplingParams, int | None], list[int]], warm: bool) -> list[list[int]]:
    """Two alternating conversations, one of which is edited, with answers that are cut off."""
    sampling, texts, answers = WARM if warm else GREEDY, {"a": A, "b": B}, []
    for turn, (name, rounds) in enumerate([("a", None), ("b", 1), ("a", None), ("b", None), ("a", 2), ("a", None)]):
        if turn == 4:
            texts["a"] = texts["a"][:-9]  # the last question is edited
        prompt = [*texts[name], 5 + turn, 6]
        answers.append(answer(prompt, replace(sampling, seed=turn), rounds))
        texts[name] = prompt + answers[-1]
    return answers


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", PLANS)
def test_alternating_conversations(pair: Pair, plan: str) -> None:
    caching, fresh, counts = set_budget(make(pair, **PLANS[plan]), 200), make(pair, cache_memory=0, **PLANS[plan]), []

    def answer(prompt: list[int], sampling: SamplingParams, rounds: int | None) -> list[int]:
        tokens = ask(caching, prompt, sampling, rounds)
        counts.append(len(prompt) - caching.stats.cached_tokens)
        return tokens

    warm = plan in ("reject", "smc")
    want = conversation(lambda prompt, sampling, rounds: ask(fresh, prompt, sampling, rounds), warm)
    assert conversation(answer, warm) == want
    answers = [0, 0, len(want[0]), len(want[1]), len(want[2]) - 9, len(want[4])]  # particles do not change it
    most = [2 + 1 + (answers[turn] if plan == "smc" else 0) for turn in range(6)]
    assert all(new <= bound for new, bound in zip(counts[2:], most[2:], strict=True)), (counts, most)


@pytest.mark.parametrize("sampling", [GREEDY, GUIDED, LONG], ids=["alone", "guided", "long"])
def test_a_longer_prompt_prefills_only_its_new_tokens(pair: Pair, sampling: SamplingParams) -> None:
    llm = set_budget(make(pair), 200)
    text = A + ask(llm, A, sampling)
    rows: list[int] = []
    for runner in runners(llm):
        runner.hooks.append(lambda began, count: rows.append(count))
    stream = llm.stream([*text, 8, 9], sampling)
    next(stream)
    assert llm.stats.cached_tokens in (len(text) - 1, len(text))
    assert max(rows) <= 2 * llm.config.verify_batch, "no prompt chunk"


def test_a_repeated_prompt_is_prefilled_once(pair: Pair) -> None:
    """All but its last token is cached, and with other sampling the answer differs."""
    llm, fresh = make(pair), make(pair, cache_memory=0)
    for sampling in (GREEDY, WARM, replace(WARM, seed=4), PENALISED):
        assert ask(llm, A, sampling) == ask(fresh, A, sampling)
        assert llm.stats.cached_tokens == (0 if sampling is GREEDY else len(A) - 1)


@pytest.mark.slow
def test_a_hybrid_continues_where_texts_branch_off(hybrid: Pair) -> None:
    """Snapshots are at the end of each prompt and where it first differs from an earlier one; the last few tokens
    before a snapshot can be replaced, too."""
    llm, fresh = make(hybrid, cache_memory=64), make(hybrid, cache_memory=0)
    system, found = HybridRequests.first_text, list[int]()
    questions = [[1, 2, 3] * 8, [4, 5] * 12, [6] * 9, [1, 2, 3] * 8, [*[1, 2, 3] * 7, 1, 9, 9], [1, 9] * 3]
    for question in questions:
        assert ask(llm, [*system, *question], GREEDY) == ask(fresh, [*system, *question], GREEDY)
        found.append(llm.stats.cached_tokens)
    whole = len(system) + 24 - 1
    assert found == [0, 0, len(system), whole, whole - 1, len(system)]
    assert ask(llm, system[:40], GREEDY) == ask(fresh, system[:40], GREEDY) and llm.stats.cached_tokens == 0


def test_the_least_recently_used_entry_is_evicted(pair: Pair) -> None:
    llm = set_budget(make(pair, "ar"), 100)
    (runner,) = runners(llm)
    prompts = [[first, *range(2, 31)] for first in range(4)]  # 30 tokens each, and one token of the answer
    one_token = replace(GREEDY, max_tokens=1)
    for prompt in (*prompts, prompts[1]):
        ask(llm, prompt, one_token)
    stored = [int(entry.tokens[0]) for entry in runner.prefix_cache.entries]
    assert stored == [0, 2, 3] and int(runner._live_tokens()[0][0]) == 1, "what is in use has no copy"
    ask(llm, [9, *prompts[0]], one_token)
    assert [int(entry.tokens[0]) for entry in runner.prefix_cache.entries] == [2, 3, 1]
    ask(llm, [2, 2], one_token)
    ask(llm, prompts[2], one_token)
    assert llm.stats.cached_tokens == 29


def test_a_partially_used_copy_stays_cached(pair: Pair) -> None:
    llm = set_budget(make(pair, "ar"), 100)
    (runner,) = runners(llm)
    for prompt in (A, B, [*A[:12], 39]):
        ask(llm, prompt, replace(GREEDY, max_tokens=1))
    assert llm.stats.cached_tokens == 12
    assert [len(entry.tokens) for entry in runner.prefix_cache.entries] == [len(B), len(A)]


def test_guided_and_unguided_requests(pair: Pair) -> None:
    """A different number of sequences reallocates the live cache; cached prefixes are copied there."""
    llm, fresh = set_budget(make(pair), 200), make(pair, cache_memory=0)
    for sampling, min_tokens in ((GREEDY, 0), (LONG, len(A) - 1), (GREEDY, len(A) - 1), (LONG, len(A) - 1)):
        assert ask(llm, A, sampling) == ask(fresh, A, sampling)
        assert llm.stats.cached_tokens >= min_tokens
    held = runners(llm)[0]._live_tokens()
    assert [len(text) for text in held] == [len(A) + 11, 30 + 11]
    assert runners(llm)[0].cached_lengths([A, LONG.negative_prompt_ids]) == [len(A) - 1, 29]


def test_a_leader_limits_the_cached_tokens(pair: Pair) -> None:
    llm = make(pair, "ar")
    (runner,) = runners(llm)
    ask(llm, A, GREEDY)
    start = request_start([*A, 3], GREEDY)
    assert with_cached_lengths(start, runner).num_cached_tokens == (len(A),)
    assert with_cached_lengths(replace(start, num_cached_tokens=(7,)), runner).num_cached_tokens == (7,)
    assert with_cached_lengths(replace(start, num_cached_tokens=()), runner).num_cached_tokens == (0,)
    assert with_cached_lengths(replace(start, sampling=GUIDED), runner, guided=True).num_cached_tokens == (len(A), 0)
    runner.prefix_cache.min_tokens = 100
    assert with_cached_lengths(replace(start, sampling=GUIDED), runner, guided=True).num_cached_tokens == (0, 0), (
        "not worth a copy"
    )
    assert verifier_of(llm).open(replace(start, num_cached_tokens=(7,))) == 7
    assert runner.cache.prefix_len == [len(A)]


def test_kv_of_logits_that_are_not_finite_is_not_cached(pair: Pair) -> None:
    llm = make(pair, "ar")
    (runner,) = runners(llm)
    want = ask(llm, A, GREEDY)
    forward = runner.model.forward

    def broken(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        return output if output.logits is None else output._replace(logits=output.logits * float("nan"))

    runner.model.forward = broken  # type: ignore[method-assign]
    with pytest.raises(NonFiniteLogits):
        ask(llm, [*A, 4], GREEDY)
    runner.model.forward = forward  # type: ignore[method-assign]
    assert runner._live_tokens() == []
    assert ask(llm, A, GREEDY) == want and llm.stats.cached_tokens == 0


def test_an_interrupted_prefill_leaves_whole_chunks(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLMEngine(pair[0], dtype=torch.float64)
    fresh = LLMEngine(pair[0], dtype=torch.float64, prefix_cache_memory=0)
    (runner,), calls = runners(llm), 0
    prompt = [7 * i % VOCAB for i in range(PREFILL_CHUNK_TOKENS + 100)]
    forward = runner.model.forward

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(runner.model, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompt, GREEDY)
    assert runner._live_tokens() == [], "the second chunk has slots and nothing in them"
    assert ask(llm, prompt, GREEDY) == ask(fresh, prompt, GREEDY)


def test_without_memory_for_a_copy_all_entries_are_dropped(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, fresh = set_budget(make(pair, "ar"), 200), make(pair, "ar", cache_memory=0)
    (runner,) = runners(llm)
    for prompt in (A, B):
        ask(llm, prompt, GREEDY)
    assert runner.prefix_cache.size > 0

    def full(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", full)
        assert ask(llm, A, GREEDY) == ask(fresh, A, GREEDY)
    assert runner.prefix_cache.size == 0


@pytest.mark.skipif(_C.level() == "none", reason="this CPU has no AVX2")
def test_with_native_operators_results_are_bitwise_identical_to_a_fresh_prefill(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, vocab=64, layers=2, dtype=torch.float32, seed=3, hidden_size=64, intermediate_size=64)
    llm, fresh = (LLMEngine(tmp_path, tmp_path, prefix_cache_memory=memory) for memory in (1, 0))
    text = [11 * i % 61 for i in range(PREFILL_CHUNK_TOKENS + 45)]
    for _ in range(3):
        text = [*text, *ask(llm, text, GREEDY), 4, 2, 9]
    assert ask(llm, text, GREEDY) == ask(fresh, text, GREEDY)
    assert llm.stats.cached_tokens >= len(text) - 4
    for ours, theirs in zip(every(llm), every(fresh), strict=True):
        count = ours.cache.prefix_len[0]
        assert torch.equal(ours.cache.kv.k[:, 0, :, :count], theirs.cache.kv.k[:, 0, :, :count])
        assert torch.equal(ours.cache.kv.v[:, 0, :, :count], theirs.cache.kv.v[:, 0, :, :count])
