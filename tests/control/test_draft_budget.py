"""The budget of the draft: what its trials cost at most, however often it pays, and that it is stored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftspec.config import EngineConfig
from swiftspec.control.draft_budget import (
    INITIAL_SAVINGS,
    MAX_ALLOWANCE,
    MAX_FAILURES,
    RECENT_ROUNDS,
    TRIAL_ROUNDS,
    TRIAL_SHARE,
    DraftBudget,
    DraftBudgets,
    StoredBudgets,
)
from swiftspec.control.measurement_file import MeasurementFile
from swiftspec.control.round_stats import RoundStats
from swiftspec.control.row_times import PairTimes, RowTimes
from swiftspec.llm_engine import LLMEngine
from swiftspec.params import SamplingParams
from tests.control.test_policy import FakeRounds
from tests.support.cases import examples
from tests.support.tiny_checkpoints import make_pair

KNOWN = PairTimes(RowTimes((1, 8), (1.0, 1.5)), RowTimes((1, 4), (0.1, 0.1)))  # a round with the draft takes 1.8
Phase = tuple[int, float, Sequence[int]]  # rounds, duration of one with the draft, its tokens in turn


def decode(phases: Sequence[Phase], request_rounds: int = 10_000) -> tuple[str, list[float]]:
    """Decodes rounds of these phases, in requests of the given number of rounds; an autoregressive round takes 1.0.
    Returns the kinds of the rounds and the time that each has lost."""
    plan = [(seconds, tokens[i % len(tokens)]) for rounds, seconds, tokens in phases for i in range(rounds)]
    stats, kinds, losses = RoundStats(EngineConfig(self_switch=True), KNOWN), "", list[float]()
    stats.budget.token_cost = 0.002
    stats.ar_seconds.append(1.0)
    for first in range(0, len(plan), request_rounds):
        part = plan[first : first + request_rounds]
        request = FakeRounds(lambda number, part=part: (*part[number], 1.0), stats)
        part_kinds = request.run(len(part))
        request.switch.close()
        kinds += part_kinds
        losses += [seconds - tokens if kind == "s" else 0.0 for kind, (seconds, tokens) in zip(part_kinds, part)]
    return kinds, losses


def bound(kinds: str, worst: float) -> float:
    """What may be lost: what is earned, the initial amount, and a round that goes beyond it."""
    return TRIAL_SHARE * kinds.count("p") + INITIAL_SAVINGS + worst


@pytest.mark.parametrize("request_rounds", [60, 10_000])
@pytest.mark.parametrize("seconds", [1.2, 2.0, 5.0])
def test_a_draft_that_never_pays_costs_a_share_of_the_time(seconds: float, request_rounds: int) -> None:
    kinds, losses = decode([(3000, seconds, (1,))], request_rounds)
    assert 0 < sum(losses) <= bound(kinds, seconds - 1)
    assert "s" in kinds[1000:], "it is tried again"


def test_a_draft_that_pays_is_always_used() -> None:
    for phase in ((1000, 2.0, (3,)), (1000, 1.5, (1, 3))):
        kinds, losses = decode([phase], 100)
        assert kinds.count("p") < 0.02 * len(kinds) and sum(losses) < 0


def test_a_draft_that_stops_paying_is_stopped() -> None:
    """Whatever it has gained before, within a few rounds."""
    kinds, losses = decode([(400, 2.0, (3,)), (1000, 2.0, (1,))])
    assert kinds[400:].index("p") <= RECENT_ROUNDS
    assert sum(losses[400:]) <= MAX_ALLOWANCE + RECENT_ROUNDS + TRIAL_SHARE * 1000


def test_a_draft_that_begins_to_pay_is_found() -> None:
    kinds, _ = decode([(200, 2.0, (1,)), (3000, 1.5, (3,))])
    again = kinds.index("s", 200)
    assert again < 1500 and kinds[again:].count("p") < 0.02 * len(kinds[again:])


PHASES = st.lists(
    st.tuples(st.integers(1, 400), st.floats(1.0, 6.0), st.lists(st.integers(1, 3), min_size=1, max_size=5)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=examples(40))
@given(PHASES, st.sampled_from((50, 10_000)))
def test_no_text_loses_more_than_its_budget(phases: list[Phase], request_rounds: int) -> None:
    """Gains and losses in any order. The first slow round of a phase is charged as an exception."""
    kinds, losses = decode(phases, request_rounds)
    worst = max(seconds for _, seconds, _ in phases) - 1
    assert sum(losses) <= bound(kinds, worst) + worst * len(phases)


def test_a_prompt_is_prefilled_when_the_draft_is_tried() -> None:
    """The price of a trial contains the prefill."""
    budget = DraftBudget(savings=13.0, allowance=-1.0, backlog=100, token_cost=0.1)
    assert not budget.may_start(2.0, None) and budget.may_start(1.5, None)
    budget.savings, budget.token_cost = 0.0, 0.002
    stats = RoundStats(EngineConfig(self_switch=True), KNOWN, speculating=False, budget=budget)
    rounds = FakeRounds(lambda _: (2.0, 3, 1.0), stats)
    opened = list[float]()
    open_draft = rounds.drafter.open
    rounds.drafter.open = lambda start: (opened.append(rounds.now), open_draft(start))[1]
    kinds = rounds.run(3000)
    begun = kinds.index("s")
    assert begun >= TRIAL_ROUNDS * 0.8 / TRIAL_SHARE and kinds[begun:].count("p") < 40
    assert opened == [pytest.approx(101.0 * begun)], "once, in the first round that uses it"


AMOUNTS = st.floats(-1e3, 1e3)
BUDGETS = st.builds(DraftBudget, AMOUNTS, AMOUNTS, st.integers(0, MAX_FAILURES), st.floats(0, 10))


@given(st.dictionaries(st.sampled_from(("greedy", "sampled", "guided")), BUDGETS))
def test_stored_budgets_are_rounded_down(budgets: dict[str, DraftBudget]) -> None:
    read = DraftBudgets.from_json(json.loads(json.dumps(DraftBudgets(budgets).to_json()))).by_kind
    assert {*read} == {*budgets}
    for kind, budget in budgets.items():
        assert budget.savings - 0.11 <= read[kind].savings <= budget.savings
        assert read[kind].spent == budget.spent and read[kind].failures == budget.failures


@pytest.mark.parametrize(
    "change",
    [{"savings": "1"}, {"failures": 9}, {"token_cost": -1.0}, {"allowance": float("nan")}, {"more": 1}],
    ids=str,
)
def test_damaged_budgets_are_ignored(change: dict[str, object], tmp_path: Path) -> None:
    file = MeasurementFile.of(tmp_path, {}, DraftBudgets)
    file.path.write_text(json.dumps({"greedy": DraftBudget().to_json() | change}))
    stored = StoredBudgets.read(file)
    assert stored.of("greedy") is None
    stored.keep("greedy", DraftBudget(3.0))
    assert (again := StoredBudgets.read(file).of("greedy")) is not None and again.savings == 3.0


def test_a_later_start_continues_with_the_budget_of_each_kind(tmp_path: Path) -> None:
    target, draft = make_pair(tmp_path, num_hidden_layers=1)
    config = EngineConfig(self_switch=True, drafter="model")

    def budgets(temperature: float | None) -> dict[str, dict[str, float]]:
        llm = LLMEngine(target, draft, config, dtype=torch.float32, device="cpu", packed_cache=tmp_path / "packed")
        if temperature is not None:
            llm.generate([1, 2, 3], SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True))
        (file,) = tmp_path.rglob("trial-budgets-*")
        return json.loads(file.read_text())

    greedy = budgets(0.0)
    assert {*greedy} == {"greedy"}
    both = budgets(0.9)
    assert {*both} == {"greedy", "sampled"} and both["greedy"] == greedy["greedy"]
    assert budgets(None) == both
