"""A worker that is a group of ranks gives the text of one rank, in each of its sessions."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from swiftspec.distributed.worker_group import WorkerGroup
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from tests.support.ranks import Pool
from tests.support.tiny_checkpoints import make_pair
from tests.support.workers import OPTIONS

PROMPT = [5, 17, 3, 29, 11, 8, 2, 30]
REQUESTS = (
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=20, ignore_eos=True),
)


@pytest.mark.parametrize(
    ("side", "plan"),
    [
        pytest.param("target", {"mode": "serial", "draft_steps": 3}, marks=pytest.mark.slow),
        pytest.param("draft", {"mode": "async", "draft_steps": 3}, marks=pytest.mark.slow),
        ("draft", {}),
    ],
)
def test_the_text_equals_that_of_one_rank(pool: Pool, tmp_path: Path, side: str, plan: dict[str, Any]) -> None:
    target, draft = make_pair(tmp_path)
    model, other = (target, draft) if side == "target" else (draft, target)
    requests = [(PROMPT, asdict(params)) for params in REQUESTS]
    job = {"side": side, "model": str(model), "other": str(other), "plan": plan, "requests": requests}
    found = pool.run(2, "decode_on_group", **job)[0]
    plain = LLMEngine(target, None, **OPTIONS)
    for (one, two, lost, accepted), params in zip(found, REQUESTS, strict=True):
        assert one == two == plain.generate(PROMPT, params).token_ids
        assert lost == [None, None] and accepted > 3


@pytest.mark.slow
def test_all_ranks_mask_the_tokens_of_a_session(pool: Pool, tmp_path: Path) -> None:
    """The draft is the target, which draws one of two tokens: with one of them masked, no round accepts it."""
    target, _ = make_pair(tmp_path)
    often = SamplingParams(max_tokens=24, seed=2, ignore_eos=True, logit_bias={10: 40.0, 50: 40.0})
    job = {"side": "draft", "model": str(target), "other": str(target), "requests": [(PROMPT, asdict(often))]}
    plan = {"mode": "serial", "draft_steps": 3, "self_switch": False}
    plain = LLMEngine(target, None, **OPTIONS).generate(PROMPT, often).token_ids
    assert {*plain} == {10, 50}
    ((one, two, lost, accepted),) = pool.run(2, "decode_on_group", plan=plan, **job)[0]
    assert one == two == plain and lost == [None, None] and accepted > 12
    ((one, two, lost, accepted),) = pool.run(2, "decode_on_group", plan=plan, renamed=[10, 50], **job)[0]
    assert one == two == plain and lost == [None, None] and accepted == 0


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("side", ["target", "draft"])
def test_all_ranks_use_an_executor_that_all_have(pool: Pool, tmp_path: Path, side: str, rank: int) -> None:
    target, draft = make_pair(tmp_path)
    model, other = (target, draft) if side == "target" else (draft, target)
    requests = [(PROMPT, asdict(REQUESTS[0]))]
    job = {"side": side, "model": str(model), "other": str(other), "requests": requests, "more_on": rank}
    ((one, two, lost, accepted),) = pool.run(2, "decode_on_group", plan={"mode": "serial", "draft_steps": 3}, **job)[0]
    assert one == two == LLMEngine(target, None, **OPTIONS).generate(PROMPT, REQUESTS[0]).token_ids
    assert lost == [None, None] and accepted > 3


def test_an_invalid_request_of_a_client_ends_no_rank(pool: Pool, tmp_path: Path) -> None:
    target, draft = make_pair(tmp_path)
    grammar, full, guided, good = pool.run(2, "refuse_on_group", side="target", model=str(target))[0]
    assert "a grammar needs" in grammar and "beyond the context" in full and "negative sequence" in guided and not good
    grammar, full, guided, good = pool.run(2, "refuse_on_group", side="draft", model=str(draft))[0]
    assert "a grammar needs" in grammar and "negative sequence" in guided and full == good == ""


def test_a_lost_follower_is_reported_on_every_call() -> None:
    class LostFollower:
        def recv(self, timeout: float) -> None:
            raise ConnectionError("rank 1 is gone")

    group, messages = WorkerGroup([LostFollower()]), list[str]()  # type: ignore[list-item]
    group.check_followers(0.0)
    group.on_lost(messages.append)
    group.check_followers(0.0)
    assert messages == ["rank 1 is gone"]
