"""Several requests on the ranks of a target group: the output of a request depends neither on its company nor on the
messages between the ranks, whose caches hold the same."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from swiftspec.builder.models import LocalRoles
from swiftspec.config import EngineConfig
from swiftspec.distributed.group.concurrent_requests import ALL_CALLS, FollowerRequests
from swiftspec.distributed.group.follower_dispatch import FollowerDispatcher
from swiftspec.distributed.transport.codec import Words
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.distributed.transport.shm import ShmTransport
from swiftspec.errors import RankLost
from swiftspec.params import SamplingParams
from swiftspec.runtime.coroutines import CallQueue
from tests.batching.test_tree_batch import (
    BAD_TOKEN,
    NATIVE,
    Arrivals,
    assert_idle,
    folder,  # noqa: F401  (a fixture)
    pair_of,  # noqa: F401  (a fixture)
    read,
    requests_of,
)
from tests.runtime.test_not_finite import damage
from tests.support.fuzz.message_words import BOUNDS
from tests.support.fuzz.roles import FakeRole
from tests.support.rank_threads import engine_on_threads

PairOf = Callable[[str], tuple[Path, Path]]


def plan(mode: str, ranks: int, requests: int) -> EngineConfig:
    return EngineConfig(mode, target_tp=ranks, max_num_seqs=requests)


def assert_equal_caches(roles: list[LocalRoles]) -> None:
    """The ranks hold the same texts, and no request has a sequence."""
    for pools in zip(*(held.pools for held in roles), strict=True):
        texts = [[[*map(int, text)] for text in pool.reusable_texts()] for pool in pools]
        assert all(each == texts[0] for each in texts) and any(texts[0])
        assert all(pool.num_free == len(pool.runner.cache.prefix_len) for pool in pools)


@pytest.mark.sampled(1)
@NATIVE
@pytest.mark.parametrize(
    ("family", "dtype", "draft", "ranks", "counts"),
    [
        ("dense", torch.float32, "model", 2, (2, 4)),
        ("dense", torch.bfloat16, None, 3, (8,)),
        pytest.param("dense", torch.float64, "model", 3, (4,), marks=pytest.mark.slow),
        pytest.param("dense", torch.bfloat16, "suffix", 2, (4,), marks=pytest.mark.slow),
        pytest.param("qwen3_next", torch.float32, "model", 2, (4,), marks=pytest.mark.slow),  # delta layers, experts
        pytest.param("qwen3_moe", torch.bfloat16, "model", 2, (8,), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_requests_decoded_together_equal_each_alone(
    pair_of: PairOf,  # noqa: F811
    family: str,
    dtype: torch.dtype,
    draft: str | None,
    ranks: int,
    counts: tuple[int, ...],
) -> None:
    prompts, sampling = requests_of(12)
    target, model = pair_of(family)
    options: dict[str, Any] = {"max_model_len": 128, "dtype": dtype}
    with engine_on_threads(target, None, plan("ar", ranks, 1), **options) as (alone, _):
        wanted = [read(alone, [prompt], [each])[0] for prompt, each in zip(prompts, sampling, strict=True)]
    mode, drafts = ("ar", None) if draft is None else ("serial", model if draft == "model" else draft)
    for requests in counts:
        with engine_on_threads(target, drafts, plan(mode, ranks, requests), **options) as (llm, roles):
            for _ in range(2):  # the second time prompts are found in the cache
                found = read(llm, prompts, sampling)
                assert [each[:2] for each in found] == [each[:2] for each in wanted]
                if dtype != torch.float64:
                    assert [each[2:] for each in found] == [each[2:] for each in wanted]
                assert_idle(llm)
        assert_equal_caches(roles)


@NATIVE
def test_rejection_sampled_requests_equal_each_alone(pair_of: PairOf) -> None:  # noqa: F811
    prompts, sampling = requests_of(8)
    sampling = [replace(each, temperature=each.temperature or 0.5) for each in sampling]
    options: dict[str, Any] = {"max_model_len": 128, "dtype": torch.float32}
    found = list[list[list[Any]]]()
    for requests in (1, 4):
        config = EngineConfig("serial", target_tp=2, max_num_seqs=requests, verify="reject", draft_steps=2)
        with engine_on_threads(*pair_of("dense"), config, **options) as (llm, roles):
            if requests == 1:
                found.append([read(llm, [prompt], [each])[0] for prompt, each in zip(prompts, sampling, strict=True)])
            else:
                found.append(read(llm, prompts, sampling))
                assert_idle(llm)
    assert found[0] == found[1]
    assert_equal_caches(roles)


@NATIVE
def test_arrivals_cancellations_errors_and_ends(pair_of: PairOf) -> None:  # noqa: F811
    target, model = pair_of("dense")
    damaged = target.parent / "damaged on ranks"
    shutil.copytree(target, damaged)
    damage(damaged, "model.embed_tokens.weight", lambda rows: rows[BAD_TOKEN].fill_(math.nan))
    prompts, sampling = requests_of(8)
    prompts = [[token for token in prompt if token != BAD_TOKEN] for prompt in prompts]
    allowed = [replace(each, logit_bias={**each.logit_bias, BAD_TOKEN: -1e9}) for each in sampling]
    options: dict[str, Any] = {"max_model_len": 128, "dtype": torch.float32}
    with engine_on_threads(damaged, model, plan("serial", 2, 3), **options) as (llm, roles):
        machine = type("Machine", (Arrivals,), {"llm": llm, "prompts": prompts, "sampling": allowed})
        machine.expected = [llm.generate(*each).token_ids for each in zip(prompts, allowed, strict=True)]
        run: Any = machine.TestCase
        run.settings = settings(max_examples=4, stateful_step_count=12, deadline=None)
        run("runTest").runTest()
    assert_equal_caches(roles)


def test_a_follower_that_fails_ends_the_batch_with_one_line(pair_of: PairOf) -> None:  # noqa: F811
    def fail(held: LocalRoles) -> None:
        steps = list[int]()

        def hook(began: float, rows: int) -> None:
            steps.append(rows)
            if len(steps) == 9:
                raise RuntimeError("the device is gone")

        held.pools[0].runner.hooks.append(hook)

    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    options: dict[str, Any] = {"max_model_len": 128, "dtype": torch.float64}
    with (
        pytest.raises(RuntimeError, match="the device is gone"),
        engine_on_threads(*pair_of("dense"), plan("serial", 2, 3), fail, **options) as (llm, _),
    ):
        with pytest.raises(RankLost) as lost:
            read(llm, [[5, 6], [7], [8, 9]], [sampling] * 3)
        assert "\n" not in str(lost.value)


def test_one_request_alone_sends_no_further_messages(
    pair_of: PairOf,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent, send = list[int](), ShmTransport.send

    def count(self: ShmTransport, kind: int, words: Words = ()) -> None:
        sent.append(kind)
        send(self, kind, words)

    monkeypatch.setattr(ShmTransport, "send", count)
    sampling, kinds = SamplingParams(max_tokens=9, ignore_eos=True), list[list[int]]()
    for requests in (1, 3):
        with engine_on_threads(*pair_of("dense"), plan("serial", 2, requests), dtype=torch.float64) as (llm, _):
            sent.clear()
            llm.generate([5, 6], sampling)
            kinds.append([*sent])
    assert kinds[0] == kinds[1] and Opcode.EXPAND not in kinds[0]


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        (Opcode.REQUEST_SELECT, [0], "must be two words, not 1"),
        (Opcode.REQUEST_SELECT, [2, 0], r"the batch index must lie in 0\.\.1"),
        (Opcode.REQUEST_SELECT, [0, 3], "the kind of calls that suspend"),
        (Opcode.REQUEST_RESUME, [0, ALL_CALLS], "request 0 has no call that has run"),
        (Opcode.CALLS_RUN, [0], "a request waits for no call"),
        (Opcode.CALLS_RUN, [], "a request waits for no call"),
        (Opcode.VERIFY, [], "a proposal of 0 words"),
    ],
)
def test_commands_in_another_order_are_refused(kind: int, words: Words, message: str) -> None:
    roles: list[Any] = [FakeRole(), FakeRole()]
    follower = FollowerRequests([FollowerDispatcher(role, None, None, BOUNDS) for role in roles], CallQueue())
    with pytest.raises(ValueError, match=message):
        follower.decode(kind, words)
