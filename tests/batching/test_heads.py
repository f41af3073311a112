"""Concurrent requests with a draft head (EAGLE-3, multi-token prediction, DFlash) have the text of each alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from swiftspec import _C
from swiftspec.config import EngineConfig
from swiftspec.drafter_kinds import GRAFTED
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from tests.batching.test_tree_batch import assert_idle, decoding_of, read
from tests.distributed.group.test_concurrent_requests import assert_equal_caches
from tests.runtime.test_head_drafter import Pair, make_head_pair
from tests.support.cases import fast_first
from tests.support.draft_heads import make_dflash
from tests.support.rank_threads import engine_on_threads
from tests.support.roles import drafter_of
from tests.support.tiny_checkpoints import make_checkpoint

OPTIONS: dict[str, Any] = {"dtype": torch.float64, "max_model_len": 128}
KINDS = ["eagle3", "dflash", "qwen3_5_text"]
PLANS: list[dict[str, Any]] = [{"verify_batch": 24}, {"drafter": GRAFTED}]
SHAPES: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 0.9}, {"temperature": 0.9, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 0.9, "guidance_scale": 1.5, "negative_prompt_ids": (4, 9, 11, 3)},
    {"temperature": 0, "verify_batch": 4, "draft_steps": 2},
]  # fmt: skip


@pytest.fixture(scope="module", params=fast_first(KINDS, 1))
def pair(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    if request.param != "dflash":
        return make_head_pair(folder, request.param)
    make_checkpoint(folder / "target", layers=6, dtype=torch.float64)
    make_dflash(folder / "head", ids=(0, 2, 3))
    return folder / "target", folder / "head"


def requests_of(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, some of which share prefixes, and parameters that differ in every feature and in length."""
    prompts = [[5, 17, 3, *(3 + (i % 3) * j % 41 for j in range(2 + 17 * i % 40))] for i in range(count)]
    shapes: list[dict[str, Any]] = [
        SHAPES[i % len(SHAPES)] | {"max_tokens": 9 + 7 * i % 24, "seed": i} for i in range(count)
    ]
    return prompts, [SamplingParams(ignore_eos=True, **shape) for shape in shapes]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, pytest.param(torch.float32, marks=pytest.mark.skipif(_C.level() == "none", reason="no AVX2"))],
    ids=str,
)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_requests_decoded_together_equal_each_alone(pair: Pair, plan: dict[str, Any], dtype: torch.dtype) -> None:
    """The second time prompts are found in the cache."""
    prompts, sampling = requests_of(8)
    options: dict[str, Any] = OPTIONS | {"dtype": dtype}
    alone = LLMEngine(pair[0], config=EngineConfig("ar"), **options)
    plain = [replace(each, verify_batch=None, draft_steps=None) for each in sampling]
    wanted = [read(alone, [prompt], [each])[0][0] for prompt, each in zip(prompts, plain, strict=True)]
    together = LLMEngine(*pair, EngineConfig("serial", max_num_seqs=3, **plan), **options)
    for _ in range(2):
        assert [each[0] for each in read(together, prompts, sampling)] == wanted
        assert_idle(together)


def test_the_head_drafts_as_well_in_company(pair: Pair) -> None:
    """It reads the hidden states of its own request: as many drafted tokens are accepted as in one request alone."""
    prompts = [[5, 17, 3, i, 11, 8] for i in range(4)]
    sampling = [SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)] * 4
    config = EngineConfig("serial", verify_batch=24, draft_steps=3)
    alone = LLMEngine(*pair, config, **OPTIONS)
    wanted = [alone.generate(*each).stats for each in zip(prompts, sampling, strict=True)]
    together = LLMEngine(*pair, replace(config, max_num_seqs=4), **OPTIONS)
    requests, chunks = together.batch(prompts, sampling)
    for _ in chunks:
        pass
    assert [(each.stats.rounds, each.stats.accepted) for each in requests] == [(s.rounds, s.accepted) for s in wanted]
    assert sum(each.accepted for each in wanted) > 0


def test_requests_share_the_forwards_of_the_head(pair: Pair) -> None:
    """Those over verified tokens, too."""
    config, forwards = EngineConfig("serial", verify_batch=4, draft_steps=2), list[int]()
    for requests in (1, 4):
        llm = LLMEngine(*pair, replace(config, max_num_seqs=requests), **OPTIONS)
        rows = list[int]()
        runner = decoding_of(llm).pools[1].runner if requests > 1 else drafter_of(llm).runner
        runner.hooks.append(lambda began, count, rows=rows: rows.append(count))
        sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        llm.generate_batch([[5, 17, 3, 9]] * requests, sampling)
        forwards.append(len(rows))
    assert forwards[1] < 2 * forwards[0]


@pytest.mark.slow
def test_ranks(pair: Pair) -> None:
    prompts, sampling = requests_of(6)
    with engine_on_threads(pair[0], None, EngineConfig("ar", target_tp=2), **OPTIONS) as (alone, _):
        plain = [replace(each, verify_batch=None, draft_steps=None) for each in sampling]
        wanted = [read(alone, [prompt], [each])[0][0] for prompt, each in zip(prompts, plain, strict=True)]
    config = EngineConfig("serial", target_tp=2, max_num_seqs=3, verify_batch=24)
    with engine_on_threads(*pair, config, **OPTIONS) as (llm, roles):
        for _ in range(2):
            assert [each[0] for each in read(llm, prompts, sampling)] == wanted
            assert_idle(llm)
    assert_equal_caches(roles)
