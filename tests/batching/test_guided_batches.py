"""Guided requests in a batch: each owns two cache sequences, and equals itself alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftspec import _C
from swiftspec.batching.decoding import BatchDecoding, BatchRequest
from swiftspec.batching.scheduler import BatchScheduler
from swiftspec.config import BatchConfig, EngineConfig
from swiftspec.engine import Stats, StopCriteria
from swiftspec.errors import NonFiniteLogits
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from tests.batching.test_batch import NonFiniteModel
from tests.batching.test_groups import FILTERED, MODELS, WARM, RequestSpec, decode_together, mixed
from tests.support.history_models import HistoryModel, make_worker
from tests.support.roles import request_start, scheduler_of
from tests.support.tiny_checkpoints import make_pair

NATIVE = pytest.mark.skipif(_C.level() == "none", reason="this CPU has no AVX2")
SHAPES: list[dict[str, Any]] = [
    {"temperature": 0.7}, {"temperature": 0.0, "guidance_scale": 2.0, "negative_prompt_ids": (9, 4, 40)},
    {"temperature": 0.9, "top_k": 20, "guidance_scale": 1.5, "negative_prompt_ids": tuple(range(1, 60))},
    {"temperature": 0.0}, {"temperature": 0.8, "guidance_scale": 3.0},
    {"temperature": 1.1, "guidance_scale": 0.5, "repetition_penalty": 1.3, "logit_bias": {5: -3.0}},
]  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), head_dim=16, intermediate_size=64)


def requests_of(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Guided and unguided requests with different prompts, lengths, scales and ends."""
    prompts = [[3 + i * j % 61 for j in range(1 + 17 * (i + 3) % 50)] for i in range(count)]
    ends = [{"max_tokens": 3 + 7 * i % 40, "ignore_eos": True, "stop_token_ids": (i % 7,)} for i in range(count)]
    return prompts, [SamplingParams(seed=i, **SHAPES[i % len(SHAPES)], **end) for i, end in enumerate(ends)]


def engine(pair: tuple[Path, Path], sequences: int, verify: str = "match", **options: Any) -> LLMEngine:
    config = EngineConfig("serial", max_num_seqs=sequences, chains=True, draft_steps=3, verify=verify)
    return LLMEngine(*pair, config, max_model_len=128, **options)


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.bfloat16, marks=NATIVE)], ids=str)
@pytest.mark.parametrize("sequences", [2, 5])
def test_coupled_chains_equal_autoregressive_decoding(
    pair: tuple[Path, Path], dtype: torch.dtype, sequences: int
) -> None:
    prompts, sampling = requests_of(9)
    alone = LLMEngine(pair[0], config=EngineConfig("ar"), max_model_len=128, dtype=dtype)
    wanted = alone.generate_batch(prompts, sampling)
    found = engine(pair, sequences, dtype=dtype).generate_batch(prompts, sampling)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]
    assert [answer.finish_reason for answer in found] == [answer.finish_reason for answer in wanted]
    unguided = [replace(each, guidance_scale=1.0) for each in sampling]
    others = alone.generate_batch(prompts, unguided)
    changed = [one.token_ids != other.token_ids for one, other in zip(wanted, others, strict=True)]
    assert changed == [each.guided for each in sampling], "guidance changes every guided text and no other"


def test_rejection_sampled_chains_equal_themselves_alone(pair: tuple[Path, Path]) -> None:
    prompts, sampling = requests_of(9)
    sampling = [each if each.temperature else replace(each, temperature=0.5) for each in sampling]
    several, one = (engine(pair, sequences, "reject", dtype=torch.float64) for sequences in (6, 2))
    found = several.generate_batch(prompts, sampling)
    assert [answer.token_ids for answer in found] == [
        one.generate(*each).token_ids for each in zip(prompts, sampling, strict=True)
    ]


def guided_specs(count: int) -> list[RequestSpec]:
    """Every other request is guided, with the empty negative prompt or another one."""
    specs = mixed(count)
    for i in range(0, count, 2):
        guidance = {"guidance_scale": 1.5 + i % 3, "negative_prompt_ids": (2, 1, 0, 1)[: i % 5]}
        specs[i] = replace(specs[i], sampling=replace(specs[i].sampling, **guidance))
    return specs


@pytest.mark.parametrize("verify", ["match", "reject"])
def test_groups_are_compacted_in_both_sequences(verify: str) -> None:
    """The logits of these models depend on every visible key, its position included; with the host one round behind
    too."""
    specs = guided_specs(12)
    wanted = decode_together(make_worker(*MODELS, BatchConfig(2, 3, verify), max_tokens=24, slots=64), specs)
    for sequences, lag in ((4, 0), (5, 1)):
        worker = make_worker(*MODELS, BatchConfig(sequences, 3, verify), max_tokens=24, slots=64, lag=lag)
        found = decode_together(worker, specs)
        assert {n: found[n].tokens for n in found} == {n: wanted[n].tokens for n in wanted}
        assert sum(answer.compactions for answer in found.values()) > 5 and not worker.groups


def test_a_guided_chain_follows_the_guided_logits() -> None:
    """Greedy, token by token, with logits computed directly from both histories."""
    target, scale, prompt, negative = MODELS[0], 2.5, (0, 1), (2, 2, 1)
    worker = make_worker(*MODELS, BatchConfig(2, 3, "match"), max_tokens=12, slots=64)
    sampling = SamplingParams(0, guidance_scale=scale, negative_prompt_ids=negative)
    answer = decode_together(worker, [RequestSpec(prompt, sampling, frozenset(), 12)])[0]
    text = list[int]()
    for _ in range(12):
        conditional, unconditional = (target.after([*before, *text]) for before in (prompt, negative))
        text.append(int((unconditional + scale * (conditional - unconditional)).argmax()))
    assert answer.tokens == text


def guided(seed: int, **values: Any) -> SamplingParams:
    return replace(WARM, seed=seed, guidance_scale=2.0, **values)


def check_is_free(worker: BatchScheduler, sequences: int) -> None:
    """All sequences can be owned again, each by one group."""
    assert not worker.groups and worker.has_room(guided(0))
    groups = [worker.admit(request_start((0, 1), WARM, request=i), (), 4) for i in range(sequences)]
    assert sorted(group.sequence for group in groups) == [*range(sequences)] and not worker.has_room(WARM)
    for group in groups:
        worker.evict_group(group)


def test_a_guided_group_owns_two_sequences_until_it_is_evicted() -> None:
    worker = make_worker(*MODELS, BatchConfig(3, 2, "match"), max_tokens=12, slots=64)
    one = worker.admit(request_start((0, 1), guided(1)), (), 9)
    assert len({*one.sequences}) == 2 and worker.has_room(WARM) and not worker.has_room(guided(2))
    other = worker.admit(request_start((1,), WARM), (), 9)
    assert {*one.sequences, *other.sequences} == {0, 1, 2} and not worker.has_room(WARM)
    worker.step()
    assert worker.cancel(one) is not None and worker.has_room(guided(2))
    worker.step()
    worker.evict_group(other)
    check_is_free(worker, 3)


def run(
    worker: BatchScheduler, samplings: Sequence[SamplingParams], cancelled: int | None = None
) -> list[BatchRequest]:
    """Decodes requests for the prompt (1, 2); one of them is cancelled after its first chunk, or while it waits."""
    ends = StopCriteria(9, ())
    requests = [
        BatchRequest(request_start((1, 2), sampling, request=i), ends, Stats()) for i, sampling in enumerate(samplings)
    ]
    waiting, started = iter(requests), set[int]()
    for request, chunk in BatchDecoding(worker).batch(
        lambda: next(waiting, None), lambda request: request.number == cancelled and 0 in started
    ):
        started.add(request.number)
        assert chunk.finish_reason is None or request.stats.finish_reason == chunk.finish_reason
    return requests


def test_a_request_waits_until_two_sequences_are_free() -> None:
    """In the order of arrival: the unguided request behind it waits too, and one that is cancelled ends at once."""
    worker = make_worker(*MODELS, BatchConfig(2, 2, "match"), max_tokens=12, slots=64)
    requests = run(worker, [WARM, guided(1), WARM])
    assert [request.stats.finish_reason for request in requests] == ["length"] * 3
    admitted = [request.admitted_at for request in requests]
    assert admitted == sorted(admitted)
    requests = run(worker, [WARM, guided(1), WARM], cancelled=1)
    assert [request.stats.finish_reason for request in requests] == ["length", "abort", "length"]
    assert requests[1].admitted_at == 0
    check_is_free(worker, 2)


def test_logits_that_are_not_finite_end_only_their_request() -> None:
    """The negative prompt ends with the token after which logits are not finite. Both sequences are wiped."""
    bias = {3: -1e9}  # no request generates that token
    worker = make_worker(NonFiniteModel(4, 1), HistoryModel(4, 2), BatchConfig(3, 2, "match"), max_tokens=12, slots=64)
    samplings = [
        replace(WARM, logit_bias=bias), guided(1, logit_bias=bias, negative_prompt_ids=(1, 3)),
        guided(2, logit_bias=bias, negative_prompt_ids=(1, 2)),
    ]  # fmt: skip
    requests = run(worker, samplings)
    assert [request.stats.finish_reason for request in requests] == ["length", "error", "length"]
    assert isinstance(requests[1].error, NonFiniteLogits) and torch.isfinite(worker.target.cache.kv.k).all()
    check_is_free(worker, 3)


def test_prefixes_of_both_sequences_are_reused(pair: tuple[Path, Path]) -> None:
    """The second turn prefills only what is new, in both sequences; the draft does not read the negative prompt."""
    llm = engine(pair, 4, dtype=torch.float64)
    rows: dict[str, list[int]] = {"target": [], "draft": []}
    scheduler = scheduler_of(llm)
    scheduler.target.hooks.append(lambda began, count: rows["target"].append(count))
    scheduler.draft.hooks.append(lambda began, count: rows["draft"].append(count))
    prompt, negative = [3 + i % 50 for i in range(50)], tuple(7 + i % 40 for i in range(45))
    sampling = SamplingParams(0.7, guidance_scale=2.0, negative_prompt_ids=negative, max_tokens=12, ignore_eos=True)

    def ask(prompt: list[int], sampling: SamplingParams) -> tuple[list[int], int, list[int]]:
        for each in rows.values():
            each.clear()
        answer = llm.generate(prompt, sampling)
        fresh = engine(pair, 4, dtype=torch.float64).generate(prompt, sampling)
        assert answer.token_ids == fresh.token_ids
        return answer.token_ids, answer.stats.cached_tokens, [sum(each) for each in rows.values()]

    text, cached, (target, draft) = ask(prompt, sampling)
    assert cached == 0
    _, again, (fewer, draft_fewer) = ask(prompt, sampling)
    assert again == len(prompt) - 1 and target - fewer == len(prompt) - 1 + len(negative) - 1
    assert draft - draft_fewer == len(prompt) - 1
    longer = replace(sampling, negative_prompt_ids=(*negative, *text, 5))
    _, cached, _ = ask([*prompt, *text, 9], longer)
    assert cached >= len(prompt) + len(text) - 4


def test_filters_apply_to_guided_logits(pair: tuple[Path, Path]) -> None:
    """Spans of requests with equal parameters but different scales share a logits processor."""
    prompts = [[5, 6, 7], [8, 9], [5, 6, 7]]
    sampling = [
        SamplingParams(0.8, seed=3, guidance_scale=scale, max_tokens=20, ignore_eos=True, **FILTERED)
        for scale in (1.0, 2.0, 4.0)
    ]
    alone = LLMEngine(pair[0], config=EngineConfig("ar"), max_model_len=128, dtype=torch.float64)
    found = engine(pair, 5, dtype=torch.float64).generate_batch(prompts, sampling)
    wanted = alone.generate_batch(prompts, sampling)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]
