"""Several requests in mode async: the draft group grows their trees while the target verifies, and the output of a
request depends neither on its company nor on the draft group."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import pytest
import torch
from hypothesis import settings

from swiftspec.builder.models import LocalRoles
from swiftspec.config import EngineConfig
from swiftspec.distributed.group.concurrent_requests import LeaderCallQueue
from swiftspec.distributed.remote import client, server
from swiftspec.distributed.transport.codec import Words
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.shm import ShmTransport
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from swiftspec.runtime.coroutines import EXPANSION, PREFILL, READ
from swiftspec.runtime.runner import Call
from tests.batching.test_tree_batch import (
    BAD_TOKEN,
    NATIVE,
    Arrivals,
    assert_idle,
    decoding_of,
    folder,  # noqa: F401  (a fixture)
    pair_of,  # noqa: F401  (a fixture)
    read,
    requests_of,
)
from tests.runtime.test_not_finite import damage
from tests.support.rank_threads import engine_on_threads

PairOf = Callable[[str], tuple[Path, Path]]
OPTIONS: dict[str, Any] = {"max_model_len": 128, "dtype": torch.float32}


def plan(requests: int, target_tp: int = 1, draft_tp: int = 1, **options: Any) -> EngineConfig:
    """With fixed d, so that the rounds of a request do not depend on time."""
    return EngineConfig(
        "async", **{"target_tp": target_tp, "draft_tp": draft_tp, "max_num_seqs": requests, "draft_steps": 3, **options}
    )


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits for its first proposal also where others would wait with it."""
    monkeypatch.setattr(client, "JOINT_OPEN_TIMEOUT_S", 60.0)


def rounds_of(llm: LLMEngine, prompts: list[list[int]], sampling: list[SamplingParams]) -> list[Any]:
    """Tokens, finish reason and verified trees of each request."""
    completions = llm.generate_batch(prompts, sampling)
    return [(each.token_ids, each.finish_reason, each.stats.verified) for each in completions]


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("patient")
@NATIVE
@pytest.mark.parametrize(
    ("family", "dtype", "ranks", "counts"),
    [
        ("dense", torch.float32, (1, 1), (2, 8)),
        ("qwen3_next", torch.float32, (1, 1), (4,)),  # delta layers, experts
        ("dense", torch.bfloat16, (2, 1), (4,)),
        ("dense", torch.bfloat16, (1, 2), (4,)),
        ("dense", torch.float64, (1, 2), (3,)),
        ("qwen3_moe", torch.bfloat16, (2, 2), (8,)),
    ],
    ids=str,
)
def test_requests_decoded_together_equal_each_alone(
    pair_of: PairOf,  # noqa: F811
    family: str,
    dtype: torch.dtype,
    ranks: tuple[int, int],
    counts: tuple[int, ...],
) -> None:
    prompts, sampling = requests_of(12)
    options: dict[str, Any] = {"max_model_len": 128, "dtype": dtype}
    with engine_on_threads(*pair_of(family), plan(1, *ranks), **options) as (alone, _):
        wanted = [read(alone, [prompt], [each])[0] for prompt, each in zip(prompts, sampling, strict=True)]
        trees = [rounds_of(alone, [prompt], [each])[0] for prompt, each in zip(prompts, sampling, strict=True)]
    for requests in counts:
        with engine_on_threads(*pair_of(family), plan(requests, *ranks), **options) as (llm, _):
            for _ in range(2):  # the second time prompts are found in the caches
                found = read(llm, prompts, sampling)
                assert [each[:2] for each in found] == [each[:2] for each in wanted]
                if dtype != torch.float64:
                    assert [each[2:] for each in found] == [each[2:] for each in wanted]
            if dtype == torch.float32:  # the trees of a draft in lower precision depend on the rows beside them
                assert rounds_of(llm, prompts, sampling) == trees
            assert_idle(llm)


@NATIVE
@pytest.mark.usefixtures("patient")
def test_rejection_sampled_requests_equal_each_alone(pair_of: PairOf) -> None:  # noqa: F811
    prompts, sampling = requests_of(8)
    sampling = [replace(each, temperature=each.temperature or 0.5) for each in sampling]
    found = list[list[Any]]()
    for requests in (1, 4):
        config = plan(requests, verify="reject", proposal="sample")
        with engine_on_threads(*pair_of("dense"), config, **OPTIONS) as (llm, _):
            if requests == 1:
                found.append([rounds_of(llm, [each], [how])[0] for each, how in zip(prompts, sampling, strict=True)])
            else:
                found.append(rounds_of(llm, prompts, sampling))
    assert found[0] == found[1]


@NATIVE
def test_arrivals_cancellations_errors_and_ends(
    pair_of: PairOf,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, model = pair_of("dense")
    damaged = target.parent / "damaged beside a draft group"
    shutil.copytree(target, damaged)
    damage(damaged, "model.embed_tokens.weight", lambda rows: rows[BAD_TOKEN].fill_(math.nan))
    prompts, sampling = requests_of(8)
    prompts = [[token for token in prompt if token != BAD_TOKEN] for prompt in prompts]
    allowed = [replace(each, logit_bias={**each.logit_bias, BAD_TOKEN: -1e9}) for each in sampling]

    def cut_prompts(held: LocalRoles) -> None:  # so that requests are also cancelled between chunks
        monkeypatch.setattr(held.pools[0].runner.ops, "PREFILL_CHUNK_ROWS", 8)

    with engine_on_threads(damaged, model, plan(3), cut_prompts, **OPTIONS) as (llm, _):
        assert decoding_of(llm).pools[0].runner.ops.PREFILL_CHUNK_ROWS == 8
        machine = type("Machine", (Arrivals,), {"llm": llm, "prompts": prompts, "sampling": allowed})
        machine.expected = [llm.generate(*each).token_ids for each in zip(prompts, allowed, strict=True)]
        run: Any = machine.TestCase
        run.settings = settings(max_examples=6, stateful_step_count=12, deadline=None)
        run("runTest").runTest()


def test_one_request_alone_sends_no_further_messages(
    pair_of: PairOf,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent, send = list[int](), ShmTransport.send

    def count(self: ShmTransport, kind: int, words: Words = ()) -> None:
        sent.append(kind)
        send(self, kind, words)

    monkeypatch.setattr(ShmTransport, "send", count)
    sampling, kinds = SamplingParams(max_tokens=20, ignore_eos=True), list[list[int]]()
    for requests in (1, 3):
        with engine_on_threads(*pair_of("dense"), plan(requests), dtype=torch.float64) as (llm, _):
            sent.clear()
            (completion,) = llm.generate_batch([[5, 6]], sampling)
            kinds.append([kind for kind in sent if kind != Opcode.PROPOSAL])  # native code replies to some results
    assert len(completion.token_ids) == 20
    assert kinds[0] == kinds[1] and Opcode.CHANNEL_SELECT not in kinds[1]


def test_expansions_and_prefill_chunks_alternate_on_the_draft(
    pair_of: PairOf,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, calls, run = list[int](), list[int](), LeaderCallQueue.run

    def count(self: LeaderCallQueue, waiting: Sequence[Call]) -> None:
        if waiting[0].priority in (READ, EXPANSION, PREFILL) and current_thread() is not main_thread():
            calls.append(waiting[0].priority)
        run(self, waiting)

    monkeypatch.setattr(LeaderCallQueue, "run", count)
    monkeypatch.setattr(server, "MAX_EXPANSIONS_BEFORE_PREFILL", 1)

    def record(held: LocalRoles) -> None:
        runner = held.pools[0].runner
        monkeypatch.setattr(runner.ops, "PREFILL_CHUNK_ROWS", 48)
        runner.hooks.append(lambda began, rows: steps.append(rows))

    options: dict[str, Any] = {"max_model_len": 512, "dtype": torch.float64, "prefix_cache_memory": 0}
    sampling = [SamplingParams(max_tokens=100, ignore_eos=True), SamplingParams(max_tokens=4, ignore_eos=True)]
    prompts = [[5, 6], [3 + i % 50 for i in range(440)]]
    with engine_on_threads(*pair_of("dense"), plan(2), record, **options) as (llm, _):
        wanted = [llm.generate(*each).token_ids for each in zip(prompts, sampling, strict=True)]
        steps.clear()
        assert [each.token_ids for each in llm.generate_batch(prompts, sampling)] == wanted
    chunks = [index for index, rows in enumerate(steps) if rows == 48]
    assert len(chunks) == 9
    assert max(after - before for before, after in pairwise(chunks)) > 1, "the other tree grows"
    assert READ in calls and (EXPANSION, PREFILL, READ) not in zip(calls, calls[1:], calls[2:], strict=False), (
        "the results of an expansion are read before the next forward"
    )


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("broken", ["forward", "rank"])
def test_requests_go_on_without_a_draft_that_fails(pair_of: PairOf, broken: str) -> None:  # noqa: F811
    """A forward that fails belongs to all requests whose trees it expands. They go on without the draft, and the next
    requests use it again, unless its rank has ended."""
    fails = [False]

    def fail(held: LocalRoles) -> None:
        def hook(began: float, rows: int) -> None:
            if fails[0]:
                fails[0] = broken == "rank"
                raise KeyError("ended") if broken == "rank" else RuntimeError("the device is gone")

        held.pools[0].runner.hooks.append(hook)

    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = [[5, 6], [7, 8, 9], [10]]
    ended = False
    try:
        with engine_on_threads(*pair_of("dense"), plan(3), fail, dtype=torch.float64) as (llm, _):
            wanted = [llm.generate(prompt, sampling).token_ids for prompt in prompts]
            text = [list[int]() for _ in prompts]
            lost = set[str]()
            for index, chunk in llm.stream_batch(prompts, sampling):
                text[index] += chunk.token_ids
                fails[0] = fails[0] or (not lost and len(text[index]) == 20)
                if llm.stats.drafter_lost is not None:
                    lost.add(llm.stats.drafter_lost)
            assert text == wanted
            assert lost and all("\n" not in reason for reason in lost)
            after = llm.generate_batch(prompts, sampling)
            assert [each.token_ids for each in after] == wanted
            assert all((each.stats.drafter_lost is None) == (broken == "forward") for each in after)
            assert all(len(each.stats.outages) == (broken == "rank") for each in after)
    except KeyError:  # of the draft's rank
        ended = True
    assert ended == (broken == "rank")
