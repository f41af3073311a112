"""A few texts that represent a population: their distribution by enumeration, and their contents."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swiftspec.config import PopulationConfig
from swiftspec.params import SamplingParams
from swiftspec.smc.group_result import GroupResult, Particle
from tests.smc.test_smc_distribution import PROMPT, STOPS, RunResults, check_unbiased
from tests.support.history_models import HistoryModel, global_power, make_worker, population
from tests.support.history_models import run as decode

SOME = (
    Particle((1,), True, 0.125), Particle((2, 3), False, 0.125), Particle((1,), True, 0.375),
    Particle((4,), True, 0.25), Particle((5,), False, 0.125), Particle((6,), False, 0.0),
)  # fmt: skip
ANSWER = GroupResult(
    tokens=[1], stopped=True, full=False, compactions=0, moved_slots=0,
    coalesced_prefix=0, ess_mean=3.0, resample_rate=0.0, log_z=0.0, particles=SOME,
)  # fmt: skip


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_choices_follow_the_distribution_of_the_population(count: int) -> None:
    """The estimate of Z times a choice's weight is unbiased for p(text)^power, as for the population as a whole."""
    plan, sampling, target = PopulationConfig(24, 2, 0.7, 2.0), SamplingParams(temperature=0.7), HistoryModel(3, 1)
    worker = make_worker(target, HistoryModel(3, 2, 0.6), plan, slots=1 + 4 * plan.slots_per_round)
    found = RunResults(target, [])
    for seed in range(80):
        decode(worker, PROMPT, replace(sampling, seed=seed), STOPS, 4)
        answer = worker.answer()
        z = sum(population(worker).values())
        choices = answer.choices(count)
        assert 1 <= len(choices) == len({each.tokens for each in choices}) <= count
        assert sum(each.weight for each in choices) == pytest.approx(1)
        found.distributions.append({each.tokens: each.weight * z for each in choices})
    check_unbiased(found, global_power(target, PROMPT, sampling, 2.0, STOPS, 4))


def test_an_answer_contains_all_particles() -> None:
    worker = make_worker(HistoryModel(3, 1), HistoryModel(3, 2), PopulationConfig(8, 2, 0.0, 2.0), slots=200)
    decode(worker, PROMPT, SamplingParams(temperature=0.7), STOPS, 5)
    answer, distribution = worker.answer(), population(worker)
    whole = sum(distribution.values())
    assert len(answer.particles) == 8 and sum(each.weight for each in answer.particles) == pytest.approx(1)
    for text, mass in distribution.items():
        equal = [each for each in answer.particles if each.tokens == text]
        assert sum(each.weight for each in equal) == pytest.approx(mass / whole)
        assert all(each.stopped == (text[-1] in STOPS) for each in equal)
    assert (*answer.tokens,) in {each.tokens for each in answer.particles}
    assert len(answer.choices(8)) == len(distribution), "all different texts, each with its share"


def test_equal_texts_are_merged_and_sorted_by_weight() -> None:
    texts = [(each.tokens, each.weight) for each in ANSWER.choices(9)]
    assert texts == [((1,), 0.5), ((4,), 0.25), ((2, 3), 0.125), ((5,), 0.125)]
    few = ANSWER.choices(3)
    assert [each.weight for each in few] == [0.5, 0.25, 0.25] and {few[0].tokens, few[1].tokens, few[2].tokens} > {(1,)}


def test_best_of_keeps_the_heaviest_texts() -> None:
    assert [(each.tokens, each.weight) for each in ANSWER.choices(2, 6)] == [((1,), 0.5), ((4,), 0.25)]
    assert ANSWER.choices(1, 6) == [Particle((1,), True, 0.5)], "not by chance"
