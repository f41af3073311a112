"""A request that sets bs and d: the text is unchanged, its rounds have that shape, and later requests are
unaffected."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftspec import answer_stats
from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.control.round_stats import RoundStats
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.messages import NodeSource
from swiftspec.params import SamplingParams
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.overlapped import ThreadedVerifier
from tests.support.cases import fast_first
from tests.support.roles import drafter_of, make_drafter, replace_roles, verifier_of
from tests.support.tiny_checkpoints import make_pair

PROMPT = [5, 17, 3, 29, 11, 8, 2, 30]
TOKENS = 20
LONG = [(7 * i + i // 5) % 60 for i in range(60)]
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 5},
    "guided": {"temperature": 0.8, "seed": 2, "guidance_scale": 2.0, "negative_prompt_ids": (9, 4, 40)},
}
SHAPES = [(1, None), (2, 1), (2, 4), (3, None), (5, 2), (8, 1), (None, 3)]
ADAPTIVE = EngineConfig(self_switch=True, adapt_steps=True, adapt_batch=True)
ENGINES: dict[str, EngineConfig] = {
    "serial": EngineConfig(draft_steps=4),
    "serial, what was measured decides": replace(ADAPTIVE, drafter="model"),
    "serial, grafted": ADAPTIVE,
    "ahead": EngineConfig(draft_steps=4),
    "ahead, the paper's rule": EngineConfig(draft_steps=4, catch_up=False),
}
BOTH = pytest.mark.parametrize("name", ["serial", "ahead"])
Pair = tuple[Path, Path]
Json = dict[str, Any]


def sampling(name: str = "greedy", **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": TOKENS, "ignore_eos": True, **REQUESTS[name], **more})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target, and the same model with noise on its weights."""
    return make_pair(tmp_path_factory.mktemp("pair"))


def made(pair: Pair, config: EngineConfig, **options: Any) -> LLMEngine:
    return LLMEngine(*pair, config, dtype=torch.float64, max_model_len=128, **options)


def engine(pair: Pair, name: str) -> LLMEngine:
    """One of ENGINES; `ahead` runs both models in one process, as on one GPU."""
    llm = made(pair, ENGINES[name])
    if name.startswith("ahead"):
        drafter = make_drafter(drafter_of(llm).runner, llm.config, ahead=True)
        replace_roles(llm, drafter, ThreadedVerifier(verifier_of(llm)))
    return llm


@pytest.mark.sampled(2)
@pytest.mark.parametrize("request_", fast_first(REQUESTS, 1))
@pytest.mark.parametrize("name", ENGINES)
def test_every_shape_has_the_same_text(pair: Pair, name: str, request_: str) -> None:
    plain = LLMEngine(pair[0], dtype=torch.float64, max_model_len=128).generate(PROMPT, sampling(request_)).token_ids
    llm, config = engine(pair, name), ENGINES[name]
    for bs, d in SHAPES:
        params = sampling(request_, verify_batch=bs, draft_steps=d)
        got = llm.generate(PROMPT, params)
        assert got.token_ids == plain and got.stats.drafter_lost is None, (bs, d)
        sizes = [len(parents) for parents, *_ in got.stats.verified]
        assert max(sizes) == (bs or config.verify_batch), (bs, d)
        report = answer_stats.metrics(llm.config.for_request(params), got.stats, TOKENS)
        assert report["verify_batch"] == max(sizes) and report["policy"] is None
        assert report["draft_steps"] == (0 if bs == 1 else d or config.initial_draft_steps)
        if bs == 1:
            assert got.stats.rounds == TOKENS and got.stats.drafted == got.stats.draft_busy_time == 0
        else:
            assert got.stats.rounds < TOKENS and got.stats.draft_busy_time > 0


@BOTH
def test_rounds_have_the_d_of_the_request(pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(pair, name)
    counts, expand = list[int](), LocalDrafter.expand

    def noted(self: LocalDrafter, count: int = 1) -> None:
        counts.append(count)
        expand(self, count)

    monkeypatch.setattr(LocalDrafter, "expand", noted)
    for d in (1, 2, 4, None):
        counts.clear()
        llm.generate(PROMPT, sampling(draft_steps=d))
        assert max(counts) == (d or 4)


@pytest.mark.sampled(1)
@BOTH
def test_the_next_request_has_the_default_shape(pair: Pair, name: str) -> None:
    llm = engine(pair, name)
    before = llm.generate(LONG, sampling("sampled"))
    shapes: list[Json] = [{"verify_batch": 1}, {"verify_batch": 2, "draft_steps": 1}, {"verify_batch": 1}]
    for shape in shapes:
        llm.generate(LONG if shape["verify_batch"] > 1 else PROMPT, sampling("sampled", **shape))
        after = llm.generate(LONG, sampling("sampled"))
        assert after.token_ids == before.token_ids and after.stats.verified == before.stats.verified
        assert after.stats.cached_tokens == len(LONG) - 1


def test_an_autoregressive_request_does_not_change_the_draft_or_its_cache(pair: Pair) -> None:
    llm = engine(pair, "serial")
    runner, read = drafter_of(llm).runner, list[int]()
    runner.hooks.append(lambda began, rows: read.append(rows))
    text = llm.generate(LONG, sampling()).token_ids
    read.clear()
    other = llm.generate([*LONG, *text[:9]], sampling(verify_batch=1)).token_ids
    assert read == []
    assert llm.generate([*LONG, *text[:9]], sampling()).token_ids == other
    assert max(read) < len(LONG), "of the prompt only what is new to it"


def test_an_autoregressive_request_ends_an_earlier_stream(pair: Pair) -> None:
    llm = engine(pair, "ahead")
    want = llm.generate(PROMPT, sampling()).token_ids
    next(llm.stream(LONG, sampling()))
    assert llm.generate(PROMPT, sampling(verify_batch=1)).token_ids == want
    assert llm.generate(PROMPT, sampling()).token_ids == want


def test_a_request_with_its_own_shape_is_not_measured(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurements of ordinary requests continue afterwards."""
    llm = engine(pair, "serial, what was measured decides")
    seen: list[RoundStats] = []
    begin = RoundStats.start_request
    monkeypatch.setattr(RoundStats, "start_request", lambda self, tokens: (seen.append(self), begin(self, tokens))[1])
    assert llm.generate(PROMPT, sampling()).stats.policy is not None
    ordinary = seen[-1]
    shapes: list[Json] = [{"verify_batch": 2}, {"draft_steps": 16}]
    for shape in shapes:
        assert llm.generate(PROMPT, sampling(**shape)).stats.policy is None
        assert seen[-1] is not ordinary
    llm.generate(PROMPT, sampling())
    assert seen[-1] is ordinary


@pytest.mark.slow
def test_nothing_is_grafted_in_a_request_with_its_own_shape(pair: Pair) -> None:
    """Its rounds do not depend on earlier requests, and later requests find its text."""
    llm = engine(pair, "serial, grafted")
    assert llm.config.grafts_suffix
    shapes: list[Json] = [{"verify_batch": 6}, {"draft_steps": 2}, {"verify_batch": 4, "draft_steps": 3}]
    for shape in shapes:
        alone, *others = (llm.generate(PROMPT, sampling(**shape)).stats for _ in range(3))
        assert all(other.verified == alone.verified for other in others)
        sources = {source for each in alone.verified for source in each.sources}
        assert sources == {NodeSource.ROOT, NodeSource.DRAFT_MODEL}
    grafted = llm.generate(PROMPT, sampling()).stats.verified
    assert NodeSource.SUFFIX in {source for each in grafted for source in each.sources}


def test_rejection_sampling_proposes_at_most_the_requested_nodes(pair: Pair) -> None:
    """tests/tree/test_sampled_distribution.py proves that the distribution of the text is unchanged."""
    llm = made(pair, EngineConfig(verify="reject"))
    for bs, d in ((None, None), (1, None), (2, 1), (5, 2), (None, 3)):
        stats = llm.generate(PROMPT, sampling("sampled", verify_batch=bs, draft_steps=d)).stats
        assert stats.tokens == TOKENS and stats.drafter_lost is None
        assert max(len(parents) for parents, *_ in stats.verified) == (bs or 8)


def test_bounds_follow_from_the_tree_capacity(pair: Pair) -> None:
    llm = made(pair, EngineConfig(verify_batch=6, draft_steps=2))
    beyond: Json = {"verify_batch": (7, 6), "draft_steps": (3, 2)}
    for name, (value, most) in beyond.items():
        with pytest.raises(UserError, match=f"{name} of a request must lie in 1..{most}, .*, not {value}"):
            llm.stream(PROMPT, SamplingParams(**{name: value}))
    none: list[Json] = [{"verify_batch": 0}, {"draft_steps": 0}]
    for shape in none:
        with pytest.raises(UserError, match="must be at least 1, not 0"):
            SamplingParams(**shape)
    assert EngineConfig(draft_steps=2, adapt_steps=True).max_draft_steps == EngineConfig("async").max_draft_steps == 16


def test_without_a_draft_a_shape_is_refused(pair: Pair) -> None:
    alone = LLMEngine(pair[0], dtype=torch.float64, max_model_len=128)
    want = alone.generate(PROMPT, sampling()).token_ids
    assert alone.generate(PROMPT, sampling(verify_batch=1)).token_ids == want
    shapes: list[Json] = [{"verify_batch": 2}, {"draft_steps": 1}]
    for shape in shapes:
        with pytest.raises(UserError, match="draft_steps of a request are not supported in mode ar"):
            alone.stream(PROMPT, sampling(**shape))
    particles = made(pair, EngineConfig("smc", population=PopulationConfig(particles=2)))
    for shape in shapes:
        with pytest.raises(UserError, match="verify_batch and draft_steps of a request are not supported in mode smc"):
            particles.stream(PROMPT, sampling("sampled", **shape))


def test_the_trace_of_an_autoregressive_request_has_one_timeline(pair: Pair, tmp_path: Path) -> None:
    llm = made(pair, ENGINES["serial"], trace=tmp_path / "trace")
    for bs in (None, 1, None):
        llm.generate(PROMPT, sampling(verify_batch=bs))
    llm.close()
    lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    rounds = [line for line in lines if "round" in line]
    for number, drafted in ((1, True), (2, False), (3, True)):
        mine = [line for line in rounds if line["request"] == number]
        assert mine and all(("draft" in line) == ("wait" in line) == drafted for line in mine)
