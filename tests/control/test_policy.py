"""The policy that switches speculation off and on: its decisions for given times, and that no decision changes a
token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import pytest
import torch

from swiftspec.config import EngineConfig
from swiftspec.control.controller import SKIPPED_ROUNDS, Controller
from swiftspec.control.policy import FIRST_DECISION_ROUNDS, REFRESH_ROUNDS, decide
from swiftspec.control.round_stats import (
    NO_SPECULATION,
    PROBE_ROUNDS,
    WINDOW_ROUNDS,
    Decision,
    RoundSample,
    RoundStats,
)
from swiftspec.distributed.transport.codec import pack_message, unpack_result
from swiftspec.llm_engine import LLMEngine
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams
from tests.support.cases import fast_first
from tests.support.proposals import draft_proposal
from tests.support.rank_jobs import switched_by_dice
from tests.support.roles import drafter_of, make_drafter, replace_roles, request_start
from tests.support.tiny_checkpoints import make_checkpoint
from tests.test_decode import GREEDY, PROMPT, SAMPLED

UNKNOWN, GLANCE = SKIPPED_ROUNDS + FIRST_DECISION_ROUNDS, SKIPPED_ROUNDS + PROBE_ROUNDS


class FakeDrafter:
    """Proposes three nodes, and requires that every token is reported to it."""

    busy, draft_steps, lost_reason = 0.0, 3, None

    def open(self, start: RequestStart) -> None:
        self.round, self.at, self.grown = 0, len(start.tokens) - 1, 0

    def propose(self) -> Proposal:
        return draft_proposal(1, self.round, self.at, (0, 0, 0), (-1, 0, 1))

    def grow(self) -> None:
        self.grown += 1

    def observe(self, result: VerifyResult) -> None:
        assert result.prefix_len == self.at and result.tokens == tuple(range(self.at, self.at + len(result.tokens)))
        assert unpack_result(pack_message(result)) == result
        self.round, self.at = result.round + 1, result.prefix_len + len(result.tokens)

    def close(self) -> None:
        pass


class FakeRounds:
    """A controller whose rounds take the times of `times`: (seconds of a speculative round, its tokens, seconds of an
    autoregressive round)."""

    def __init__(self, times: Callable[[int], tuple[float, int, float]], measured: RoundStats | None = None) -> None:
        self.now, self.times, self.drafter = 0.0, times, FakeDrafter()
        measured = measured or RoundStats(EngineConfig(self_switch=True))
        self.switch = Controller(self.drafter, lambda kind: measured, clock=lambda: self.now)
        self.switch.open(request_start([0], GREEDY))
        self.kinds = ""

    def run(self, rounds: int) -> str:
        """s for a speculative round, p for an autoregressive one."""
        for number in range(rounds):
            proposal = self.switch.propose()
            assert proposal.round == number
            tree, tokens, plain = self.times(number)
            speculative = len(proposal.tokens) > 1
            count = tokens if speculative else 1
            self.switch.grow()
            self.now += tree if speculative else plain
            first = proposal.prefix_len
            tokens = tuple(range(first, first + count))
            self.switch.observe(VerifyResult(1, number, first, tuple(range(count)), tokens))
            self.kinds += "s" if speculative else "p"
            self.now += 100.0  # the time of the consumer is not counted
        return self.kinds


def test_profitable_speculation_measures_only_a_few_autoregressive_rounds() -> None:
    rounds = FakeRounds(lambda _: (1.5, 3, 1.0))
    trusted = REFRESH_ROUNDS + 1 + SKIPPED_ROUNDS
    assert rounds.run(600) == (UNKNOWN * "s" + GLANCE * "p" + trusted * "s" + GLANCE * "p" + 600 * "s")[:600]
    report = rounds.switch.report()
    assert report is not None
    assert (report.break_even, report.speedup, report.ar_rounds) == (1.5, 2.0, 2 * GLANCE)
    assert report.changes[:2] == ((UNKNOWN, NO_SPECULATION), (UNKNOWN + GLANCE, Decision(3, 8, True)))
    assert rounds.drafter.grown == 600 - 2 * GLANCE


def test_one_slow_round_changes_nothing() -> None:
    rounds = FakeRounds(lambda number: (500.0 if number % 7 == 6 else 1.5, 3, 1.0))
    assert "p" not in rounds.run(400)[UNKNOWN + GLANCE :]


def test_decide_is_a_function_of_the_observations() -> None:
    config = EngineConfig(draft_steps=5, verify_batch=6, self_switch=True)
    measured = RoundStats(config)
    assert decide(measured) == decide(measured) == Decision(5, 6, True)
    assert measured == RoundStats(config)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    model = make_checkpoint(target, vocab=64, layers=2, dtype=torch.float64, seed=1)
    noise = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=noise, dtype=weight.dtype)
    model.save_pretrained(draft)
    return target, draft


@pytest.mark.slow
@pytest.mark.parametrize("ahead", fast_first([True, False], 1))
@pytest.mark.parametrize("sampling", fast_first([SAMPLED, GREEDY], 1), ids=["sampled", "greedy"])
def test_no_decision_changes_a_token(pair: tuple[Path, Path], ahead: bool, sampling: SamplingParams) -> None:
    """Random decisions, in short and long stretches: the draft is inactive, catches up by more than w tokens, and
    continues with another d and another bs."""
    sampling = replace(sampling, max_tokens=100)
    plain = LLMEngine(pair[0], dtype=torch.float64).generate(PROMPT, sampling).token_ids
    llm = LLMEngine(*pair, EngineConfig(self_switch=True), dtype=torch.float64)
    drafter = make_drafter(drafter_of(llm).runner, llm.config, ahead=ahead)
    switch = Controller(drafter, cache(lambda kind: RoundStats(llm.config)))
    replace_roles(llm, switch)
    for chance in (0.5, 0.1):
        with switched_by_dice(chance):
            answer = llm.generate(PROMPT, sampling)
        assert answer.token_ids == plain and answer.stats.drafter_lost is None
        steering = switch.report()
        assert steering is not None and 10 < steering.ar_rounds < answer.stats.rounds - 10
        assert len(steering.changes) > 5


def test_the_policy_is_optional(pair: tuple[Path, Path]) -> None:
    assert LLMEngine(*pair, EngineConfig(), dtype=torch.float64).generate(PROMPT, GREEDY).stats.policy is None
    assert LLMEngine(pair[0], dtype=torch.float64).generate(PROMPT, GREEDY).stats.policy is None


@pytest.mark.parametrize(("draft", "low", "high"), [(0.02, 5, 8), (0.2, 3, 4), (1.0, 1, 2)])
def test_the_first_rounds_choose_d_by_the_cost_of_forwards(draft: float, low: int, high: int) -> None:
    """The cost of a draft forward relative to a verification, long before the acceptance rate is known."""
    m = RoundStats(EngineConfig(adapt_steps=True))
    for _ in range(FIRST_DECISION_ROUNDS - 1):
        m.add(RoundSample(1.0 + 3 * draft, 1.0, 3 * draft, 1, ()))
        assert decide(m) == m.current
    m.add(RoundSample(1.0 + 3 * draft, 1.0, 3 * draft, 1, ()))
    decided = decide(m)
    assert low <= decided.steps <= high and decided.nodes == m.nodes and decided.speculate
    fixed = RoundStats(EngineConfig(self_switch=True))
    fixed.speculative_rounds.extend(m.speculative_rounds)
    fixed.ar_seconds.append(1.0)
    fixed.rounds = FIRST_DECISION_ROUNDS
    assert decide(fixed) == fixed.current


@pytest.mark.parametrize(("row", "low", "high"), [(0.9, 8, 8), (0.3, 2, 2)])
def test_measured_autoregressive_rounds_let_the_first_rounds_choose_bs(row: float, low: int, high: int) -> None:
    """`row`: the time of a verification of one row, relative to one of eight."""
    m = RoundStats(EngineConfig(self_switch=True, adapt_steps=True, adapt_batch=True))
    for _ in range(FIRST_DECISION_ROUNDS):
        m.add(RoundSample(1.3, 1.0, 0.3, 1, ()))
    assert decide(m) == NO_SPECULATION
    m.apply(NO_SPECULATION)
    for _ in range(PROBE_ROUNDS):
        assert decide(m) == NO_SPECULATION
        m.add(RoundSample(row, row, 0.0, 1, ()))
    decided = decide(m)
    assert decided.speculate and low <= decided.nodes <= high
    m.apply(decided)
    m.add(RoundSample(1.3, 1.0, 0.3, 1, ()))
    assert decide(m) == decided, "from now on acceptance counts, once it is known"


@pytest.mark.parametrize("mode", ["serial", "async"])
def test_a_verification_of_one_row_is_kept(mode: Literal["serial", "async"]) -> None:
    """`verify_batch` 1 has no smaller candidate."""
    m = RoundStats(EngineConfig(mode, verify_batch=1, self_switch=True, adapt_steps=True, adapt_batch=True))
    for _ in range(3 * WINDOW_ROUNDS):
        decided = decide(m)
        assert decided.nodes == 1
        m.apply(decided)
        m.add(RoundSample(1.3, 1.0, 0.3, 1, ()) if decided.speculate else RoundSample(1.0, 1.0, 0.0, 1, ()))
