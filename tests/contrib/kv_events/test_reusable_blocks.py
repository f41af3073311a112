"""The blocks that subscribers know are those that the prefix cache can reuse, whatever the requests were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.contrib.kv_events.events import KvEvent, KvEventBatch
from swiftspec.contrib.kv_events.reusable_blocks import ReusableBlocks
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from swiftspec.runtime.prefix_caching import PrefixCachingRunner
from swiftspec.smc.scheduler import BatchScheduler
from tests.support.kv_events import ClearedEvent, EventBatch, KvIndex, StoredEvent
from tests.support.tiny_checkpoints import make_pair

VOCAB, CONTEXT, SIZE = 40, 160, 4
TEXTS = st.lists(st.integers(0, 1), max_size=20)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
GUIDED = replace(GREEDY, guidance_scale=2.0, negative_prompt_ids=(7, 30, 12, 5, 6, 9))
PLANS = {
    "ar": EngineConfig("ar"),
    "serial": EngineConfig("serial"),
    "smc": EngineConfig("smc", population=PopulationConfig(3, 2)),
    "several": EngineConfig("serial", draft_steps=3, max_num_seqs=3),
}
Pair = tuple[Path, Path]


def received(events: Sequence[KvEvent]) -> EventBatch:
    """A batch of events, as a subscriber decodes it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(KvEventBatch(1.5, [*events])), type=EventBatch)


@given(st.lists(st.lists(TEXTS, max_size=4), max_size=8))
def test_an_index_follows_the_texts(updates: list[list[list[int]]]) -> None:
    blocks, index = ReusableBlocks(SIZE, "model"), KvIndex(SIZE)
    for texts in updates:
        events = blocks.update([np.array(text, np.int64) for text in texts])
        index.apply(received(events))
        wanted = {tuple(text[:end]) for text in texts for end in range(SIZE, len(text) + 1, SIZE)}
        assert set(index.keys.values()) == wanted
        assert blocks.update([np.array(text, np.int64) for text in texts]) == []


def test_the_encoding_is_that_of_vllm() -> None:
    text = np.arange(2 * SIZE + 1)
    cleared, stored = received(ReusableBlocks(SIZE, "model").update([text])).events
    assert cleared == ClearedEvent()
    assert isinstance(stored, StoredEvent) and stored.token_ids == [*range(2 * SIZE)] and stored.medium == "GPU"
    batch = KvEventBatch(1.5, ReusableBlocks(SIZE, "model").update([text]))
    seconds, events, rank = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
    assert (seconds, rank) == (1.5, 0) and events[0] == {"type": "AllBlocksCleared"}
    assert {**events[1], "block_hashes": []} == {
        "type": "BlockStored", "block_hashes": [], "parent_block_hash": None, "token_ids": stored.token_ids,
        "block_size": SIZE, "lora_id": None, "medium": "GPU", "lora_name": None,
    }  # fmt: skip


def test_hashes_depend_on_the_model_and_on_all_earlier_tokens() -> None:
    def hashes(model: str, *tokens: int) -> list[int]:
        stored = received(ReusableBlocks(2, model).update([np.array(tokens)])).events[1]
        assert isinstance(stored, StoredEvent)
        return stored.block_hashes

    one = hashes("a", 1, 2, 3, 4)
    assert one == hashes("a", 1, 2, 3, 4) and one[:1] == hashes("a", 1, 2, 9, 9)[:1]
    assert not {*one} & {*hashes("b", 1, 2, 3, 4), *hashes("a", 5, 2, 3, 4)}


class RequestsOfAnEngine(RuleBasedStateMachine):
    """Successive requests, most of which continue an earlier text, or end early. What an index predicts before each of
    them is what the prefix cache supplies, rounded to blocks."""

    pair: Pair
    plan: EngineConfig
    exact: ClassVar[bool] = True
    engines: ClassVar[list[LLMEngine]] = []

    def __init__(self) -> None:
        super().__init__()
        if not self.engines:
            self.engines.append(LLMEngine(*self.pair, self.plan, dtype=torch.float64, max_model_len=CONTEXT))
        self.engine, self.texts = self.engines[0], [[(7 * i * i + i) % VOCAB for i in range(45)]]
        self.blocks, self.index = ReusableBlocks(SIZE, "model"), KvIndex(SIZE)
        self.set_budget(100)

    def set_budget(self, budget: int) -> None:
        parts = self.engine.roles.inner_roles
        for runner in (parts.target, parts.draft) if isinstance(parts, BatchScheduler) else (parts.target,):
            if isinstance(runner, PrefixCachingRunner):
                share = budget if runner is parts.target else budget * 2 // 3
                runner.prefix_cache.budget, runner.prefix_cache.min_tokens = share + 8 * runner._snapshot_tokens, 4
                runner.prefix_cache.update([], [])

    @rule(budget=st.sampled_from([0, 30, 60, 1000]))
    def evict(self, budget: int) -> None:
        self.set_budget(budget)

    @rule(
        data=st.data(), sampling=st.sampled_from([GREEDY, GREEDY, GUIDED]), rounds=st.sampled_from([None, None, 1, 2])
    )
    def ask(self, data: st.DataObject, sampling: SamplingParams, rounds: int | None) -> None:
        if self.plan.mode == "smc":
            sampling = replace(sampling, temperature=1.0, guidance_scale=1.0, negative_prompt_ids=())
        before = data.draw(st.sampled_from(self.texts))
        length = data.draw(st.sampled_from([len(before), len(before) - 1]) | st.integers(0, len(before)))
        new = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6))
        prompt = [*before[:length], *new][: CONTEXT - 40]
        predicted = self.follow().matched_tokens(prompt[:-1])
        tokens, stream = list[int](), self.engine.stream(prompt, sampling)
        for count, chunk in enumerate(stream, 1):
            tokens += chunk.token_ids
            if count == rounds:
                known = self.follow().matched_tokens(prompt[:-1])
                assert sampling.guided or known == (len(prompt) - 1) // SIZE * SIZE, "also while a request runs"
                stream.close()
        self.texts.append([*prompt, *tokens])
        if sampling.guided:
            self.texts.append([*sampling.negative_prompt_ids, *tokens])
        cached = self.engine.stats.cached_tokens // SIZE * SIZE
        assert sampling.guided or (predicted == cached if self.exact else predicted >= cached)

    def follow(self) -> KvIndex:
        """The index after the events so far."""
        self.index.apply(received(self.blocks.update(self.engine.roles.reusable_texts())))
        return self.index


class RequestsOfAHybrid(RequestsOfAnEngine):
    """With delta layers, of which only some prefixes can be reused."""

    exact: ClassVar[bool] = False


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), vocab=VOCAB, seed=3)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("hybrid"), vocab=VOCAB, family="qwen3_5_text")


def test_after_a_guided_request_texts_must_fit_the_prefix_cache(pair: Pair) -> None:
    """The next request without guidance reallocates the live cache."""
    engine = LLMEngine(*pair, PLANS["serial"], dtype=torch.float64, max_model_len=CONTEXT, prefix_cache_memory=1)
    prompt, parts = [*range(1, 40)], engine.roles.inner_roles
    assert isinstance(parts.target, PrefixCachingRunner)
    for budget, found in ((0, 0), (1000, 36)):
        parts.target.prefix_cache.budget = budget
        engine.generate(prompt, GUIDED)
        blocks, index = ReusableBlocks(SIZE, "model"), KvIndex(SIZE)
        index.apply(received(blocks.update(engine.roles.reusable_texts())))
        assert index.matched_tokens(prompt[:-1]) == found
        assert engine.generate(prompt, GREEDY).stats.cached_tokens // SIZE * SIZE == found


@pytest.mark.slow
@pytest.mark.parametrize("examples", [4, pytest.param(40, marks=pytest.mark.long)])
@pytest.mark.parametrize("plan", [*PLANS, "hybrid"])
def test_the_index_predicts_the_cached_tokens(pair: Pair, hybrid: Pair, plan: str, examples: int) -> None:
    base = RequestsOfAHybrid if plan == "hybrid" else RequestsOfAnEngine
    values = {"pair": hybrid if plan == "hybrid" else pair, "plan": PLANS.get(plan, PLANS["serial"]), "engines": []}
    machine: Any = type("Machine", (base,), values)
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=examples, stateful_step_count=8, deadline=None, suppress_health_check=checks),
    )
