"""Exact requests in one batch, as chains of draft tokens: each equals autoregressive decoding, or follows its
distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.reference import chains as reference_chains
from swiftspec.backends.reference import reference
from swiftspec.backends.reference.noise import counters, gumbel, row_bits
from swiftspec.config import BatchConfig, EngineConfig
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from tests.batching.test_groups import FILTERED, MODELS, RequestSpec, decode_together, mixed
from tests.support.history_models import HistoryModel, global_power, make_worker
from tests.support.roles import make_runner, make_scheduler
from tests.support.tiny_checkpoints import make_pair

SHAPES: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 0.9, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.05, "logit_bias": {5: -3.0}, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
]  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), head_dim=16, intermediate_size=64)


def requests_of(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and lengths that differ, with all logits parameters."""
    prompts = [[3 + i * j % 61 for j in range(1 + 31 * (i + 3) % 95)] for i in range(count)]
    ends = [{"max_tokens": 3 + 7 * i % 40, "ignore_eos": i % 2 > 0, "stop_token_ids": (i % 7,)} for i in range(count)]
    return prompts, [SamplingParams(seed=i, **SHAPES[i % 4], **end) for i, end in enumerate(ends)]


def engine(pair: tuple[Path, Path], groups: int, steps: int = 3, verify: str = "match", **options: Any) -> LLMEngine:
    config = EngineConfig("serial", max_num_seqs=groups, chains=True, draft_steps=steps, verify=verify)
    return LLMEngine(*pair, config, max_model_len=96, **options)


NATIVE = pytest.mark.skipif(_C.level() == "none", reason="this CPU has no AVX2")


DTYPES = pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.bfloat16, marks=NATIVE)], ids=str)


@DTYPES
def test_coupled_chains_equal_autoregressive_decoding(pair: tuple[Path, Path], dtype: torch.dtype) -> None:
    prompts, sampling = requests_of(8)
    plain = LLMEngine(pair[0], config=EngineConfig("ar"), max_model_len=96, dtype=dtype)
    wanted = plain.generate_batch(prompts, sampling)
    found = engine(pair, 3, dtype=dtype).generate_batch(prompts, sampling)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]
    assert [answer.finish_reason for answer in found] == [answer.finish_reason for answer in wanted]
    if dtype == torch.float64:
        assert {"stop", "length"} == {answer.finish_reason for answer in found}
    for answer in found:
        stats = answer.stats
        assert stats.population is None and stats.rounds == len(stats.verified) and stats.drafted == 3 * stats.rounds
        assert stats.tokens == stats.rounds + stats.accepted
    if dtype == torch.float64:  # in bfloat16 the draft's head is rounded
        config = EngineConfig("serial", max_num_seqs=2, chains=True, draft_steps=3)
        same = LLMEngine(pair[0], pair[0], config, max_model_len=96, dtype=dtype)
        answer = same.generate([5, 6], SamplingParams(0.7, seed=1, max_tokens=40, ignore_eos=True))
        assert answer.stats.rounds == 10 and answer.stats.accepted == 30, "a draft that says what the target will"


@DTYPES
def test_rejection_sampled_chains_equal_themselves_alone(pair: tuple[Path, Path], dtype: torch.dtype) -> None:
    prompts, sampling = requests_of(8)
    sampling = [each if each.temperature else replace(each, temperature=0.5) for each in sampling]
    several, one = (engine(pair, groups, verify="reject", dtype=dtype) for groups in (4, 2))
    found = several.generate_batch(prompts, sampling)
    assert [answer.token_ids for answer in found] == [
        one.generate(*each).token_ids for each in zip(prompts, sampling, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["match", "reject"])
@pytest.mark.parametrize("shaped", [{}, FILTERED], ids=["plain", "filtered"])
def test_texts_follow_the_target(verify: str, shaped: dict[str, Any]) -> None:
    """By enumeration of all texts of up to four tokens: chi-square over the likely ones."""
    plan = BatchConfig(16, 2, verify)
    target, draft = HistoryModel(3, 1), HistoryModel(3, 2)
    worker = make_worker(target, draft, plan, max_tokens=8, slots=32)
    warm = SamplingParams(temperature=0.8, **shaped)
    runs = 800
    requests = [RequestSpec((0, 1), replace(warm, seed=seed), frozenset({2}), 4) for seed in range(runs)]
    found = Counter(tuple(answer.tokens) for answer in decode_together(worker, requests).values())
    law = global_power(target, [0, 1], warm, 1.0, {2}, 4)
    assert {*found} <= {*law} and sum(law.values()) == pytest.approx(1)
    likely = [text for text, mass in law.items() if mass * runs >= 8]
    rest = runs - sum(found[text] for text in likely), runs * (1 - sum(law[text] for text in likely))
    cells = [(found[text], runs * law[text]) for text in likely] + ([rest] if rest[1] > 1 else [])
    apart = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    free = len(cells) - 1
    assert free >= 3 and apart < free + 4 * (2 * free) ** 0.5 + 4


def test_chains_are_admitted_and_released_in_one_batch() -> None:
    """Also with the host one round behind."""
    requests = mixed(10)
    alone = make_worker(*MODELS, BatchConfig(1, 3, "match"), max_tokens=24, slots=64)
    wanted = decode_together(alone, requests)
    for lag in (0, 1):
        plan = BatchConfig(4, 3, "match")
        found = decode_together(make_worker(*MODELS, plan, max_tokens=24, slots=64, lag=lag), requests)
        assert {n: found[n].tokens for n in found} == {n: wanted[n].tokens for n in wanted}
        assert sum(answer.compactions for answer in found.values()) > 5


class FusedChains:
    """The reference operators, and those for chains that only the CUDA backend has."""

    def __init__(self) -> None:
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(reference, name)

    def match_chains(self, logits: Tensor, vocab: int, tokens: Tensor, keys: Tensor | None, scores: Any) -> Any:
        self.calls += 1
        assert logits.shape[:2] == (len(tokens), tokens.shape[1] + 1) and logits.shape[2] >= vocab
        rows = logits.flatten(0, 1)
        if keys is None:
            best = reference.draw(rows, vocab, scores)
        else:
            assert keys.shape == logits.shape[:2]
            best = reference.draw_keyed(rows, vocab, keys.flatten(), scores)[0]
        return reference_chains.accept_matching_prefix(best.view(logits.shape[:2]), tokens)

    def reject_chains(self, target: Tensor, draft: Tensor, tokens: Tensor, uniforms: Tensor, keys: Tensor) -> Any:
        self.calls += 1
        noise = gumbel(row_bits(keys, counters(range(target.shape[-1]))), target.dtype)
        return reference_chains.verify_by_rejection(target, draft, tokens, uniforms, noise)


@pytest.mark.parametrize("verify", ["match", "reject"])
def test_the_operators_of_a_backend_verify_chains(verify: str) -> None:
    """They get what the reference implementation gets: with filters, penalties and bias, greedy, and guided."""
    requests = mixed(8)
    changes: list[dict[str, Any]] = [{"logit_bias": {1: 0.5}}, {"guidance_scale": 2.0}]
    changes += [{"temperature": 0.0}] if verify == "match" else []
    for i, change in enumerate(changes):
        requests[i] = replace(requests[i], sampling=replace(requests[i].sampling, **change))
    plan, ops, found = BatchConfig(4, 3, verify), FusedChains(), list[dict[int, list[int]]]()
    for each in (reference, ops):
        target, draft = (make_runner(model, each, context=40, tree_slots=64) for model in MODELS)
        answers = decode_together(make_scheduler(target, draft, plan, max_tokens=24), requests)
        found.append({number: answer.tokens for number, answer in answers.items()})
    assert found[0] == found[1] and ops.calls > 10


def test_requests_that_chains_do_not_support_are_refused(pair: tuple[Path, Path]) -> None:
    configs: Sequence[tuple[dict[str, Any], str]] = [
        ({"mode": "ar"}, "not supported in mode ar"),
        ({"mode": "smc"}, "use smc_groups"),
        ({"mode": "serial", "target_remote": True}, "target_url is not supported with max_num_seqs above 1"),
        ({"mode": "serial", "proposal": "top"}, "proposal, which verify determines, is not supported"),
        ({"mode": "serial", "self_switch": True}, "self_switch is not supported with max_num_seqs above 1"),
        ({"mode": "serial", "draft_steps": 64}, "draft_steps must lie in 1..63, not 64"),
    ]
    for config, message in configs:
        with pytest.raises(UserError, match=message):
            EngineConfig(max_num_seqs=2, chains=True, **config)
    llm = engine(pair, 2)
    assert (llm.config.verify_batch, llm.config.draft_leaves, llm.max_num_seqs) == (4, 1, 2)
    requests: Sequence[tuple[dict[str, Any], str]] = [
        (
            {"logprobs": 1},
            "log-probabilities are not supported with max_num_seqs above 1 with verify reject, or use max_num_seqs 1",
        ),
        ({"draft_steps": 2}, "verify_batch and draft_steps of a request are not supported"),
    ]
    for sampling, message in requests:
        with pytest.raises(UserError, match=f"request 0 of the batch: {message}"):
            llm.generate_batch([[1]], SamplingParams(**sampling))
    with pytest.raises(UserError, match="temperature 0 is not supported with proposal sample"):
        engine(pair, 2, verify="reject").generate([1], SamplingParams(0))
