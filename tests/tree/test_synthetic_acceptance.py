"""Synthetic acceptance: the mean of its schedule, and the path that it accepts."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import ceil, floor
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swiftspec.params import SamplingParams
from swiftspec.sampling.sampler import Sampler
from swiftspec.tree.acceptance import Accepted
from swiftspec.tree.synthetic_acceptance import AcceptanceSchedule, SyntheticAcceptance, heaviest_path
from tests.support.proposals import draft_proposal

SEEDS = st.integers(0, 2**64 - 1)


@given(st.floats(1, 64), SEEDS, st.integers(0, 10**6), st.integers(1, 200))
def test_successive_rounds_have_the_mean_of_the_schedule(length: float, seed: int, first: int, rounds: int) -> None:
    schedule = AcceptanceSchedule(length, seed)
    counts = [schedule.num_accepted(round_) for round_ in range(first, first + rounds)]
    assert {*counts} <= {floor(length - 1), ceil(length - 1)}
    assert abs(sum(counts) - rounds * (Fraction(length) - 1)) < 1 + 1e-6


@given(st.integers(1, 64), SEEDS, st.integers(0, 10**6))
def test_a_whole_length_is_that_of_every_round(length: int, seed: int, round_: int) -> None:
    assert AcceptanceSchedule(length, seed).num_accepted(round_) == length - 1


@pytest.mark.parametrize("round_", [0, 1, 17])
def test_over_all_seeds_every_round_has_the_mean(round_: int) -> None:
    """Without that, short answers would begin with the same number of nodes, whatever the seed is."""
    counts = [AcceptanceSchedule(2.3, seed).num_accepted(round_) for seed in range(4000)]
    assert fmean(counts) == pytest.approx(1.3, abs=0.03)


def test_the_path_follows_the_heaviest_child_to_a_leaf() -> None:
    parents = (-1, 0, 0, 1, 2, 2, 5)
    weights = (0.0, -2.0, -1.0, -2.5, -3.0, -3.0, -4.0)
    for count, path in ((0, [0]), (1, [0, 2]), (2, [0, 2, 4]), (9, [0, 2, 4])):
        assert heaviest_path(parents, weights, count) == path
    assert heaviest_path((-1,), (0.0,), 3) == [0]


def test_the_bonus_token_is_that_of_the_target() -> None:
    """Also after a child whose token the target did not sample."""
    sampler = Sampler(SamplingParams(temperature=0, seed=4), (), 50, "cpu")
    accept = SyntheticAcceptance(sampler, 2.0)
    proposal = draft_proposal(1, 3, 7, (9, 20, 30), (-1, 0, 1))
    logits = torch.tensor(np.random.default_rng(1).normal(size=(3, 50)), dtype=torch.float32)
    positions = torch.tensor([7, 8, 9])
    drawn = logits.argmax(-1).tolist()
    assert drawn[0] != 20
    assert accept(proposal, logits, None, positions) == Accepted([0, 1], [20, drawn[1]])
    assert accept(replace(proposal, round=8), logits, None, positions).path == [0, 1]
    assert SyntheticAcceptance(sampler, 1.0)(proposal, logits, None, positions) == Accepted([0], [drawn[0]])
    assert SyntheticAcceptance(sampler, 64.0)(proposal, logits, None, positions).tokens == [20, 30, drawn[2]]


def test_logits_that_are_not_finite_are_marked() -> None:
    accept = SyntheticAcceptance(Sampler(SamplingParams(temperature=0), (), 50, "cpu"), 2.0)
    proposal = draft_proposal(1, 0, 7, (9, 20), (-1, 0))
    assert accept.accept(proposal, [3, -1]).tokens == [20, -1]
