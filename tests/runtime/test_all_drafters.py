"""What every drafter must stand, after failures that other engines have had: rounds with any number of nodes,
rejections at any depth, a grammar that forbids every draft, stops and limits within an accepted run, log-probabilities,
token rules."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftspec.config import EngineConfig
from swiftspec.drafter_kinds import GRAFTED
from swiftspec.engine import Completion, TreeDecoding
from swiftspec.llm_engine import LLMEngine
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.runtime.drafter import Drafter
from swiftspec.runtime.local_drafter import LocalDrafter
from tests.support.cases import fast_first
from tests.support.draft_heads import add_mtp, make_dflash, make_eagle3
from tests.support.roles import replace_roles, tree_of, verifier_of
from tests.support.tiny_checkpoints import make_pair
from tests.support.token_constraints import OneHalf
from tests.support.toy_pair import byte_level_tokenizer, write_tokenizer

OPTIONS: dict[str, Any] = {"dtype": torch.float64, "max_model_len": 160}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, seed=3)
PROMPT = [5, 17, 3, 29, 11, 8, 2, 30] * 3
VOCAB = 300
SHAPE: dict[str, Any] = {"vocab": VOCAB, "tie": False}
KINDS = ("model+suffix", "suffix", "eagle3", "mtp", "dflash", "model", "hybrid model")
HYBRIDS = ("mtp", "hybrid model")  # the kinds whose target is a hybrid
Answers = dict[tuple[tuple[int, ...], str], Completion]  # by prompt and sampling parameters


@dataclass(frozen=True)
class Engines:
    """Engines on the same target: without a draft, and with the drafter."""

    plain: LLMEngine
    drafting: LLMEngine
    drafter: Drafter
    answers: Answers

    def want(self, prompt: list[int], sampling: SamplingParams) -> Completion:
        """The answer without a draft, decoded once for all drafters of a target."""
        key = (*prompt,), repr(sampling)
        if key not in self.answers:
            self.answers[key] = self.plain.generate(prompt, sampling)
        return self.answers[key]


@pytest.fixture(scope="module")
def answers() -> dict[bool, Answers]:
    """Those of `Engines`, by whether the target is a hybrid."""
    return {True: {}, False: {}}


@pytest.fixture(scope="module", params=fast_first(KINDS, 1))
def engines(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, answers: Any) -> Engines:
    kind: str = request.param
    target, draft = make_models(tmp_path_factory.mktemp("models"), kind)
    config = EngineConfig("serial", verify_batch=16, drafter=GRAFTED if "+" in kind else "model")
    drafting = LLMEngine(target, draft, config, **OPTIONS)
    decoding = drafting.decoding
    assert isinstance(decoding, TreeDecoding)
    return Engines(LLMEngine(target, **OPTIONS), drafting, decoding.drafter, answers[kind in HYBRIDS])


def make_models(folder: Path, kind: str) -> tuple[Path, Path | str]:
    if kind in HYBRIDS:
        target, draft = make_pair(folder, family="qwen3_5_text", **SHAPE)
    else:
        target, draft = make_pair(folder, layers=3, **SHAPE)
    write_tokenizer(target, byte_level_tokenizer())
    if kind == "eagle3":
        make_eagle3(folder / "head", layers=(1, 2, 3), vocab=VOCAB, draft_vocab=VOCAB)
        return target, folder / "head"
    if kind == "dflash":
        make_dflash(folder / "head", vocab=VOCAB, num_target_layers=3, ids=(0, 1))
        return target, folder / "head"
    if kind == "mtp":
        add_mtp(target)
    return target, {"suffix": "suffix", "mtp": "mtp"}.get(kind, draft)


class ChangedProposals:
    """A drafter whose proposals are changed before the verification."""

    draft_steps, lost_reason = 3, None

    def __init__(self, drafter: Drafter, change: Callable[[Proposal], Proposal]) -> None:
        self._drafter, self._change = drafter, change

    @property
    def busy(self) -> float:
        return self._drafter.busy

    def open(self, start: RequestStart) -> None:
        self._drafter.open(start)

    def propose(self) -> Proposal:
        return self._change(self._drafter.propose())

    def grow(self) -> None:
        self._drafter.grow()

    def observe(self, result: VerifyResult) -> None:
        self._drafter.observe(result)

    def close(self) -> None:
        self._drafter.close()


def changed(engines: Engines, change: Callable[[Proposal], Proposal]) -> LLMEngine:
    replace_roles(engines.drafting, ChangedProposals(engines.drafter, change))
    return engines.drafting


def unchanged(engines: Engines) -> LLMEngine:
    return changed(engines, lambda proposal: proposal)


def first_nodes(proposal: Proposal, count: int) -> Proposal:
    names = ("tokens", "parents", "weights", "sources")
    return replace(proposal, **{name: getattr(proposal, name)[:count] for name in names})


def test_rounds_with_any_number_of_nodes(engines: Engines) -> None:
    dice = random.Random(5)
    llm = changed(engines, lambda whole: first_nodes(whole, dice.choice([1, 1, 2, 5, 16])))
    prompts = (PROMPT, [*PROMPT, 40], PROMPT[:9])  # with reuse of the prefix
    for sampling, prompt in zip((GREEDY, SEEDED, SEEDED), prompts, strict=True):
        assert llm.generate(prompt, sampling).token_ids == engines.want(prompt, sampling).token_ids


def test_rejections_at_any_depth(engines: Engines) -> None:
    dice = random.Random(6)

    def spoil(whole: Proposal) -> Proposal:
        depths = [0]
        for parent in whole.parents[1:]:
            depths.append(depths[parent] + 1)
        wrong = dice.randint(1, 4)
        tokens = [(token + (depth == wrong)) % VOCAB for token, depth in zip(whole.tokens, depths, strict=True)]
        return replace(whole, tokens=tuple(tokens))

    llm = changed(engines, spoil)
    for sampling in (GREEDY, SEEDED):
        assert llm.generate(PROMPT, sampling).token_ids == engines.want(PROMPT, sampling).token_ids


def test_a_grammar_that_forbids_every_draft(engines: Engines) -> None:
    llm, inner = unchanged(engines), tree_of(engines.drafting).drafter
    sampling = replace(SEEDED, grammar="start: /[a-z]*/")  # in its place OneHalf
    runners = [verifier_of(each).runner for each in (engines.plain, llm)]
    constraints = [runner.make_constraint for runner in runners]
    for runner in runners:
        runner.make_constraint = lambda grammar: OneHalf(upper=True)
    if isinstance(inner, LocalDrafter):
        runners.append(inner.runner)
        constraints.append(inner.runner.make_constraint)
        inner.runner.make_constraint = lambda grammar: OneHalf(upper=False)
    try:
        prompt = [token % 150 for token in PROMPT]
        answer = llm.generate(prompt, sampling)
        assert answer.token_ids == engines.plain.generate(prompt, sampling).token_ids and min(answer.token_ids) >= 150
        assert answer.stats.drafter_lost is None and len(answer.token_ids) == 40
    finally:
        for runner, constraint in zip(runners, constraints, strict=True):
            runner.make_constraint = constraint
    want = engines.want(PROMPT, SEEDED).token_ids
    assert llm.generate(PROMPT, SEEDED).token_ids == want == engines.plain.generate(PROMPT, SEEDED).token_ids


def test_stops_and_limits_within_a_run(engines: Engines) -> None:
    llm, text = unchanged(engines), engines.want(PROMPT, SEEDED).token_ids
    for at in (*range(1, 8), 15, 16, 17):
        for sampling in (
            replace(SEEDED, stop_token_ids=(text[at],)),
            replace(SEEDED, max_tokens=at),
            replace(SEEDED, stop_token_ids=(text[at],), max_tokens=text.index(text[at]) + 1),
        ):
            got, want = llm.generate(PROMPT, sampling), engines.want(PROMPT, sampling)
            assert (got.token_ids, got.finish_reason) == (want.token_ids, want.finish_reason)
            assert got.stats.tokens == len(got.token_ids) == got.stats.rounds + got.stats.accepted


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", [0, 3])
def test_log_probabilities(engines: Engines, count: int) -> None:
    sampling = replace(SEEDED, logprobs=count)
    got, want = (
        [each for chunk in llm.stream(PROMPT, sampling) for each in chunk.logprobs or ()]
        for llm in (unchanged(engines), engines.plain)
    )
    assert len(got) == len(want) == 40 and any(each.logprob < -0.1 for each in got)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.rank == theirs.rank and [token for token, _ in mine.top] == [token for token, _ in theirs.top]
        values = [mine.logprob, *(value for _, value in mine.top)]
        assert values == pytest.approx([theirs.logprob, *(value for _, value in theirs.top)], abs=1e-9)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "rules",
    [
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"repetition_penalty": 1.4, "temperature": 0},
        {"min_tokens": 20, "stop_token_ids": tuple(range(60))},
        {"bad_words_ids": ((7,), (3, 9), (40, 41))},
        {"logit_bias": {3: 4.0, 8: -50.0}},
    ],
    ids=lambda rules: "-".join(rules),
)
def test_penalties_and_token_rules(engines: Engines, rules: dict[str, Any]) -> None:
    sampling = replace(SEEDED, **rules)
    got, want = unchanged(engines).generate(PROMPT, sampling), engines.want(PROMPT, sampling)
    assert (got.token_ids, got.finish_reason) == (want.token_ids, want.finish_reason)


def test_seeds(engines: Engines) -> None:
    llm = unchanged(engines)
    first, again, other = (llm.generate(PROMPT, replace(SEEDED, seed=seed)).token_ids for seed in (7, 7, 8))
    assert first == again != other
