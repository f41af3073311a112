"""Suffix lookup grafted on a draft model: the text equals that of autoregressive decoding, and rounds skip the model
where suffix lookup alone is faster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftspec.config import EngineConfig
from swiftspec.control.controller import Controller
from swiftspec.control.draft_budget import STOPPED, DraftBudget
from swiftspec.control.round_stats import RoundStats
from swiftspec.drafter_kinds import GRAFTED
from swiftspec.errors import DrafterLost, UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.messages import NodeSource, Proposal, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.runtime.drafter import NoDrafter
from swiftspec.runtime.fallback_drafter import FallbackDrafter
from swiftspec.runtime.suffix_drafter import SuffixDrafter
from swiftspec.startup.built_in_models import DEMO_MODELS
from swiftspec.text.codec import TextCodec
from tests.support.ranks import Pool
from tests.support.roles import request_start, tree_of
from tests.support.tiny_checkpoints import make_pair

GREEDY = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.7, seed=11)
GUIDED = replace(SEEDED, guidance_scale=1.5, negative_prompt_ids=(9, 4, 40))
LINES = "".join(f"    self.value_{name} = value_{name}\n" for name in "abcdefgh")
assert DEMO_MODELS.draft is not None
DEMO = DEMO_MODELS.target, DEMO_MODELS.draft


def sources(answer: Any) -> set[NodeSource]:
    return {source for each in answer.stats.verified for source in each.sources}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, GUIDED], ids=["greedy", "seeded", "guided"])
def test_the_text_equals_plain_decoding(sampling: SamplingParams) -> None:
    prompt = TextCodec(DEMO[0]).encode(LINES)
    grafted = LLMEngine(*DEMO, EngineConfig(drafter=GRAFTED))
    want = LLMEngine(DEMO[0]).generate(prompt, sampling).token_ids
    answers = [grafted.generate(prompt, sampling) for _ in range(2)]  # the second one is a copy of the first
    assert all(answer.token_ids == want and answer.stats.drafter_lost is None for answer in answers)
    assert NodeSource.SUFFIX in sources(answers[1])
    assert answers[1].stats.tokens / answers[1].stats.rounds > 3


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_the_text_of_random_models_equals_plain_decoding(tmp_path: Path, family: str) -> None:
    target, draft = make_pair(tmp_path, family=family)
    options: dict[str, Any] = {"dtype": torch.float64, "max_model_len": 200}
    plain, grafted = LLMEngine(target, **options), LLMEngine(target, draft, EngineConfig(drafter=GRAFTED), **options)
    for sampling in (GREEDY, SEEDED, GUIDED, GREEDY):
        prompt = [5, 17, 3, 29, 11, 8, 2, 30] * 4
        assert grafted.generate(prompt, sampling).token_ids == plain.generate(prompt, sampling).token_ids


@pytest.mark.parametrize(("mode", "target_tp", "draft_tp"), [("serial", 2, -1), ("async", 1, 1)])
def test_ranks(tmp_path: Path, pool: Pool, mode: str, target_tp: int, draft_tp: int) -> None:
    target, draft = make_pair(tmp_path, num_attention_heads=8, hidden_size=64)
    plain = LLMEngine(target, dtype=torch.float64)
    common = {"seed": 3, "max_tokens": 60, "ignore_eos": True}
    requests = [([5, 17, 3, 29] * 6, {"temperature": t, **common}) for t in (0, 0.7)]
    plan = {"mode": mode, "target_tp": target_tp, "draft_tp": draft_tp, "drafter": GRAFTED}
    answers = pool.run(2, "decode", target=str(target), draft=str(draft), plan=plan, requests=requests * 2)[0]
    for answer, (prompt, values) in zip(answers, requests * 2, strict=True):
        assert answer["tokens"] == plain.generate(prompt, SamplingParams(**values)).token_ids
        assert answer["lost"] is None
    assert answers[2]["rounds"] < answers[0]["rounds"]


class Scripted(NoDrafter):
    """A drafter that proposes one wrong token, takes time, and records the results that it observes."""

    draft_steps = 1

    def __init__(self, clock: Any, seconds: float) -> None:
        self.clock, self.seconds, self.results, self.proposals = clock, seconds, list[VerifyResult](), 0

    def propose(self) -> Proposal:
        self.clock.now += self.seconds
        self.proposals += 1
        root = super().propose()
        place = root.request, root.round, root.prefix_len
        return Proposal.from_draft_model(*place, [root.tokens[0], 61], [-1, 0], [0.0, -3.0])

    def observe(self, result: VerifyResult) -> None:
        self.results.append(result)
        super().observe(result)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Copying:
    """A verifier of a text that repeats 20 tokens; a verification takes a second."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.nodes = clock, list[int]()

    def verify(self, proposal: Proposal) -> VerifyResult:
        self.clock.now += 1
        self.nodes.append(len(proposal.tokens))
        text = [(proposal.prefix_len + 1 + i) % 20 for i in range(64)]
        path = (0, *proposal.match_path(text))
        return VerifyResult(proposal.request, proposal.round, proposal.prefix_len, path, tuple(text[: len(path)]))


def graft(model: Scripted, clock: Clock, config: EngineConfig, budget: DraftBudget | None = None) -> FallbackDrafter:
    """A drafter that grafts suffix lookup on `model`, with an open request of a text that repeats 20 tokens."""
    suffix, budget = SuffixDrafter(8, 1000), budget or DraftBudget()
    stats = RoundStats(config, speculating=not budget.spent, budget=budget)
    stats.ar_seconds.append(1.0)
    grafted = FallbackDrafter(Controller(model, lambda kind: stats, suffix=suffix, clock=clock), suffix)
    grafted.open(request_start([i % 20 for i in range(60)], GREEDY))
    return grafted


@pytest.mark.parametrize(("draft_s", "mode"), [(2.0, "serial"), (0.001, "serial"), (2.0, "async")])
def test_rounds_skip_a_slow_model(draft_s: float, mode: Any) -> None:
    """In mode async the draft expands while the target verifies, so that skipping it saves nothing."""
    clock = Clock()
    model, verifier = Scripted(clock, draft_s), Copying(clock)
    grafted = graft(model, clock, EngineConfig(mode))
    results = list[VerifyResult]()
    for _ in range(20):
        proposal = grafted.propose()
        results.append(verifier.verify(proposal))
        grafted.grow()
        grafted.observe(results[-1])
    assert (model.proposals < 5) == (mode == "serial" and draft_s > 1) and max(verifier.nodes) == 8
    if model.proposals == 20:
        assert model.results == results
    observed = [token for result in model.results for token in result.tokens]
    want = [token for result in results for token in result.tokens]
    assert observed == want[: len(observed)]


def test_suffix_lookup_remains_while_the_model_waits_for_a_trial() -> None:
    """The budget of the model is spent, and what suffix lookup gains is not credited to it."""
    clock = Clock()
    model, verifier, budget = Scripted(clock, 2.0), Copying(clock), DraftBudget(0.0, STOPPED)
    grafted = graft(model, clock, EngineConfig(self_switch=True), budget)
    for _ in range(40):
        grafted.observe(verifier.verify(grafted.propose()))
    grafted.close()
    assert model.proposals == 0 and max(verifier.nodes) == 8 and budget.savings == pytest.approx(0.4)


def test_a_model_that_adds_nothing_to_suffix_lookup_is_charged_its_time() -> None:
    clock = Clock()
    model, verifier, budget = Scripted(clock, 0.3), Copying(clock), DraftBudget()
    grafted = graft(model, clock, EngineConfig("async", self_switch=True), budget)
    for _ in range(60):
        grafted.observe(verifier.verify(grafted.propose()))
    assert budget.spent and 10 < model.proposals < 40


def test_a_skipped_model_receives_the_missed_rounds() -> None:
    """When the text no longer repeats itself."""
    clock = Clock()
    model = Scripted(clock, 2.0)
    grafted = graft(model, clock, EngineConfig("serial"))
    verifier, tokens = Copying(clock), list[int]()
    for _ in range(10):
        result = verifier.verify(grafted.propose())
        grafted.observe(result)
        tokens += result.tokens
    before = model.proposals
    while model.proposals == before:  # surprises
        proposal = grafted.propose()
        clock.now += 1
        new = 30 + len(tokens) % 29
        if proposal.tokens[1:2] == (new,):
            new += 1
        grafted.observe(VerifyResult(proposal.request, proposal.round, proposal.prefix_len, (0,), (new,)))
        tokens.append(new)
    observed = [token for result in model.results for token in result.tokens]
    assert observed == tokens


def test_a_lost_model_leaves_suffix_lookup(tmp_path: Path) -> None:
    target, draft = make_pair(tmp_path)
    llm = LLMEngine(target, draft, EngineConfig(drafter=GRAFTED), max_model_len=200)
    prompt = [5, 17, 3, 29] * 6
    plain = LLMEngine(target, max_model_len=200).generate(prompt, GREEDY)

    def fail() -> Proposal:
        raise DrafterLost("the link is down")

    local: Any = tree_of(llm).drafter
    local.propose = fail
    answer = llm.generate(prompt, GREEDY)
    assert answer.token_ids == plain.token_ids and answer.stats.drafter_lost == "the link is down"


def test_grafting_needs_a_draft_model() -> None:
    with pytest.raises(UserError, match="not supported without a draft model"):
        LLMEngine(DEMO[0], None, EngineConfig(drafter=GRAFTED))
