"""The distribution of a population, proved by enumeration: every text of a small vocabulary, with models that depend on
the whole history.

For every text, the estimate of Z times the text's share of the weight is unbiased for p(text)^alpha, at any N. That is
tested most, since it is exact; the share alone is off by about 1 / N. A run costs nearly the same at N = 8 and at N =
64, so most tests have many particles and few runs; a mistake of order 1 / N shows where never and always resampling are
tested, with few particles.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from swiftspec.backends.reference.noise import counters, gumbel, row_bits
from swiftspec.config import PopulationConfig
from swiftspec.params import SamplingParams
from swiftspec.smc.noise_streams import ParticleStreams
from tests.support.cases import fast_first
from tests.support.history_models import (
    HistoryModel,
    TextDistribution,
    distance,
    global_power,
    local_power,
    make_worker,
    normalised,
    population,
)
from tests.support.history_models import run as decode

PROMPT, STOPS = [0, 1], {2}


@dataclass
class RunResults:
    """The results of many runs with different seeds."""

    target: HistoryModel
    distributions: list[TextDistribution]  # of each run: the estimate of Z times the weighted population
    effective: float = 0.0  # ESS / N, mean
    resampled: float = 0.0  # share of the rounds

    def unbiased(self) -> TextDistribution:
        return mean(self.distributions)

    def shares(self) -> TextDistribution:
        """The weighted population alone."""
        return mean([normalised(distribution) for distribution in self.distributions])


def mean(distributions: list[TextDistribution]) -> TextDistribution:
    out: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for distribution in distributions:
        for text, mass in distribution.items():
            out[text] += mass / len(distributions)
    return dict(out)


def sample(
    plan: PopulationConfig,
    sampling: SamplingParams,
    runs: int,
    *,
    vocab: int = 3,
    limit: int = 4,
    same: bool = False,
    sharpness: float = 0.6,
) -> RunResults:
    """The draft is flatter than the target: otherwise rare texts of great weight would need many more runs."""
    target = HistoryModel(vocab, 1)
    found = RunResults(target, [])
    worker = make_worker(
        target, target if same else HistoryModel(vocab, 2, sharpness), plan, slots=1 + 4 * plan.slots_per_round
    )
    for seed in range(runs):
        decode(worker, PROMPT, replace(sampling, seed=seed), STOPS, limit)
        answer = worker.answer()
        assert not answer.full
        found.distributions.append(population(worker))
        found.effective += answer.ess_mean / plan.particles / runs
        found.resampled += answer.resample_rate / runs
    return found


def check_unbiased(found: RunResults, exact: TextDistribution) -> None:
    """Z, each text with a share of at least 3 %, and the others together: within 4 standard errors."""
    whole, runs = sum(exact.values()), len(found.distributions)
    assert all(set(distribution) <= set(exact) for distribution in found.distributions)
    groups = [{text} for text, mass in exact.items() if mass >= 0.03 * whole]
    groups += [set(exact) - set().union(*groups), set(exact)]
    for group in groups:
        seen = torch.tensor(
            [sum(distribution.get(text, 0.0) for text in group) for distribution in found.distributions]
        )
        error = float(seen.std()) / runs**0.5
        assert abs(float(seen.mean()) - sum(exact[text] for text in group)) < 4 * error + 1e-6 * whole, group


@pytest.mark.sampled(1)
@pytest.mark.parametrize("temperature", fast_first([0.7, 1.0], 1))
@pytest.mark.parametrize("power", [1.0, 2.0])
@pytest.mark.parametrize("steps", fast_first([2, 1], 1))
def test_the_population_follows_the_global_power_target(power: float, temperature: float, steps: int) -> None:
    runs, sampling = 50, SamplingParams(temperature=temperature)
    found = sample(PopulationConfig(64, steps, 0.85, power), sampling, runs)
    exact = global_power(found.target, PROMPT, sampling, power, STOPS, 4)
    check_unbiased(found, exact)
    assert 0 < found.resampled < 1
    assert distance(normalised(found.unbiased()), normalised(exact)) < 0.06
    if power != 1:
        local = local_power(found.target, PROMPT, sampling, power, STOPS, 4)
        apart = distance(local, normalised(exact))
        assert apart > 0.1 and distance(normalised(found.unbiased()), local) > apart / 2


@pytest.mark.parametrize("plan", [PopulationConfig(8, 2, 0.85, 2.0), PopulationConfig(8, 2, 0.85, 2.0, 1)], ids=str)
def test_a_draft_that_computes_its_last_token_immediately_has_the_same_distribution(plan: PopulationConfig) -> None:
    """Population by population, wherever resampling and rejections have left the rows."""
    sampling = SamplingParams(temperature=0.7)
    deferred, immediate = (sample(replace(plan, deferred_bonus=yes), sampling, 20, limit=8) for yes in (True, False))
    for distribution, same in zip(deferred.distributions, immediate.distributions, strict=True):
        assert distribution == pytest.approx(same)
    assert 0 < deferred.resampled < 1


@pytest.mark.slow
def test_five_tokens_and_longer_texts() -> None:
    runs, sampling = 60, SamplingParams(temperature=1.0)
    found = sample(PopulationConfig(64, 2, 0.5, 2.0), sampling, runs, vocab=5, limit=5)
    check_unbiased(found, global_power(found.target, PROMPT, sampling, 2.0, STOPS, 5))


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_the_distribution_is_exact_with_any_resampling_threshold(threshold: float) -> None:
    runs, sampling = 250, SamplingParams(temperature=0.7)
    found = sample(PopulationConfig(8, 1, threshold, 2.0), sampling, runs)
    assert found.resampled == pytest.approx(threshold, abs=0.02), "flat weights, now and then, need none"
    check_unbiased(found, global_power(found.target, PROMPT, sampling, 2.0, STOPS, 4))


@pytest.mark.parametrize("filters", fast_first([{"top_p": 0.7}, {"top_k": 2}, {"min_p": 0.5}], 1), ids=str)
def test_filters_apply_to_the_target_and_no_weight_is_lost(filters: dict[str, float]) -> None:
    runs, sampling = 50, SamplingParams(temperature=0.7, **filters)  # pyright: ignore[reportArgumentType]
    found = sample(PopulationConfig(40, 2, 0.5, 2.0), sampling, runs)
    exact = global_power(found.target, PROMPT, sampling, 2.0, STOPS, 4)
    assert len(exact) < 31, "something is filtered"
    check_unbiased(found, exact)


@pytest.mark.parametrize(
    ("shaped", "exact"),
    [
        ({"logit_bias": {1: 0.7}}, 0),
        pytest.param({"top_k": 2}, 0, marks=pytest.mark.slow),
        pytest.param({}, 1, marks=pytest.mark.slow),
    ],
    ids=["biased", "filtered", "exact"],
)
def test_penalties_follow_the_text_of_each_particle(shaped: dict[str, Any], exact: int) -> None:
    """Particles have different histories, which resampling mixes."""
    sampling = SamplingParams(
        temperature=0.7, repetition_penalty=1.6, presence_penalty=0.5, frequency_penalty=0.4, **shaped
    )
    found = sample(PopulationConfig(40, 2, 0.85, 2.0, exact), sampling, 50, limit=5)
    exact_distribution = global_power(found.target, PROMPT, sampling, 2.0, STOPS, 5)
    check_unbiased(found, exact_distribution)
    without = global_power(found.target, PROMPT, SamplingParams(temperature=0.7), 2.0, STOPS, 5)
    assert found.resampled > 0 and distance(normalised(exact_distribution), normalised(without)) > 0.15, "they matter"


@pytest.mark.parametrize(("exact", "power"), fast_first([(3, 2.0), (1, 1.0), (1, 2.0)], 1, unpack=True))
def test_mixed_mode_is_exact(exact: int, power: float) -> None:
    runs, sampling = 40, SamplingParams(temperature=0.7)
    found = sample(PopulationConfig(40, 3, 0.5, power, exact), sampling, runs, limit=5)
    check_unbiased(found, global_power(found.target, PROMPT, sampling, power, STOPS, 5))


def test_all_tokens_verified_is_exact_without_weights() -> None:
    """Weights are uniform, so that the shares are counts, and there is no resampling: every particle is an independent
    run."""
    sampling = SamplingParams(temperature=1.0)
    found = sample(PopulationConfig(40, 2, 0.0, 1.0, 2), sampling, 12)
    assert found.effective == pytest.approx(1)
    exact = global_power(found.target, PROMPT, sampling, 1.0, STOPS, 4)
    check_unbiased(found, exact)
    assert distance(found.shares(), exact) < 0.1


@pytest.mark.slow
def test_all_tokens_verified_is_exact_with_one_particle() -> None:
    runs, sampling = 250, SamplingParams(temperature=1.0)
    found = sample(PopulationConfig(1, 2, 0.5, 1.0, 2), sampling, runs)
    exact = global_power(found.target, PROMPT, sampling, 1.0, STOPS, 4)
    check_unbiased(found, exact)
    assert distance(found.shares(), exact) < 0.1
    plain = sample(PopulationConfig(1, 2), sampling, runs)
    assert distance(plain.shares(), exact) > 0.15, "without verification one particle follows the draft"


@pytest.mark.parametrize("exact", [0, 2])
def test_a_draft_equal_to_the_target_gives_uniform_weights(exact: int) -> None:
    found = sample(PopulationConfig(6, 2, 0.9, 1.0, exact), SamplingParams(temperature=0.7), 40, same=True)
    assert found.effective == pytest.approx(1) and found.resampled == 0
    assert sum(found.unbiased().values()) == pytest.approx(1)


def test_one_particle_is_the_draft_then_the_bonus_token() -> None:
    target, draft, sampling = HistoryModel(5, 3), HistoryModel(5, 4), SamplingParams(temperature=0.7, seed=11)
    worker = make_worker(target, draft, PopulationConfig(1, 1))
    decode(worker, PROMPT, sampling, set(), 9)
    streams, text, log_weight = ParticleStreams(1, 1, "cpu"), list(PROMPT), 0.0
    streams.seed(0, 11)
    while len(text) < len(PROMPT) + 9:
        first, extra = (
            gumbel(row_bits(keys, counters(range(5))), torch.float64)[0]
            for keys in streams.round_keys(torch.tensor([[len(text), len(text) + 1]]))
        )
        q = draft.after(text) / 0.7
        token = int((q + first).argmax())
        log_weight += float((target.after(text) / 0.7).log_softmax(-1)[token] - q.log_softmax(-1)[token])
        text.append(token)
        p = target.after(text) / 0.7
        text.append(int((p + extra).argmax()))
    assert worker.answer().tokens == text[len(PROMPT) : len(PROMPT) + 9]
    assert worker.answer().log_z == pytest.approx(log_weight)


@pytest.mark.parametrize(
    ("power", "temperature"),
    [
        pytest.param(1.0, 1.0, marks=pytest.mark.slow),  # and 2.0, 0.7 below
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((1.0, 0.7), (2.0, 0.7), (2.0, 1.0))),
    ],
)
def test_more_particles_reduce_the_bias(power: float, temperature: float) -> None:
    """The share of the weight alone, whose distance also contains the noise of 500 runs: 0.01 to 0.03 at N = 16."""
    sampling, apart = SamplingParams(temperature=temperature), []
    for particles in (2, 16):
        found = sample(PopulationConfig(particles, 1, 0.5, power), sampling, 500, sharpness=1.5)
        exact = normalised(global_power(found.target, PROMPT, sampling, power, STOPS, 4))
        apart.append(distance(found.shares(), exact))
    assert apart[0] > 3 * apart[1] and apart[1] < 0.1


@pytest.mark.slow
def test_the_bias_is_proportional_to_one_over_n() -> None:
    """The share of the weight alone; bench/log/2026-11-21.md has more figures. A quarter with four times the N."""
    sampling, apart = SamplingParams(temperature=0.7), []
    for particles, runs in ((4, 600), (16, 500)):
        found = sample(PopulationConfig(particles, 1, 0.5, 2.0), sampling, runs, sharpness=1.5)
        exact = normalised(global_power(found.target, PROMPT, sampling, 2.0, STOPS, 4))
        apart.append(distance(found.shares(), exact))
    assert 2.5 < apart[0] / apart[1] < 6 and apart[1] < 0.1
