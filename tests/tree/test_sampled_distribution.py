"""Sampled proposals by enumeration: their texts follow the target distribution exactly, over rounds and re-roots."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
import torch

from swiftspec.config import EngineConfig
from swiftspec.control import policy
from swiftspec.control.controller import Controller
from swiftspec.control.draft_budget import DraftBudget
from swiftspec.control.round_stats import Decision, RoundStats
from swiftspec.params import SamplingParams
from swiftspec.sampling.sampler import Sampler
from swiftspec.tree import sampled_children
from swiftspec.tree.sampled_children import SampledChildren
from tests.support.cases import fast_first
from tests.support.enumeration import Pair, longest_branch, orders


def plan_of(mode: str, bs: int, w: int, d: int) -> EngineConfig:
    return EngineConfig(mode=mode, verify_batch=bs, draft_leaves=w, draft_steps=d, verify="reject")


PLAIN = SamplingParams(temperature=0.8)
CASES = [  # mode, bs, w, d, vocab, rounds, tokens
    ("serial", 3, 1, 2, 3, 1, 3),
    ("serial", 2, 1, 1, 3, 2, 3),
    ("serial", 4, 2, 1, 4, 1, 2),
    ("async", 4, 1, 1, 2, 2, 3),  # a proposal often has too few nodes, so the tree expands once more
]
SLOW = [
    ("serial", 3, 1, 2, 2, 2, 3),
    ("async", 6, 1, 2, 2, 2, 4),
    ("async", 4, 2, 1, 2, 2, 3),
    ("async", 3, 1, 1, 2, 4, 4),
]
LONG = [  # as the first and the last, with one more token
    ("serial", 3, 1, 2, 3, 2, 3),
    ("async", 3, 1, 1, 3, 2, 3),
]


def check(case: tuple[str, int, int, int, int, int, int], sampling: SamplingParams, seed: int) -> None:
    mode, bs, w, d, vocab, rounds, tokens = case
    with pytest.MonkeyPatch.context() as patch:
        pair = Pair(vocab, seed, plan_of(mode, bs, w, d), sampling)
        apart, runs = pair.enumerate(patch, rounds, tokens)
    assert apart < 1e-12 and runs > 3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_texts_follow_the_target(case: tuple[str, int, int, int, int, int, int]) -> None:
    check(case, PLAIN, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=mark)
        for cases, mark in ((SLOW, pytest.mark.slow), (LONG, pytest.mark.long))
        for case in cases
    ],
    ids=str,
)
def test_texts_follow_the_target_over_more_rounds(case: tuple[str, int, int, int, int, int, int]) -> None:
    check(case, PLAIN, 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.8, top_k=2),
        SamplingParams(temperature=1.3, top_p=0.7),
        SamplingParams(min_p=0.3),
        SamplingParams(logit_bias={0: 1.0}),
        SamplingParams(repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2),
    ],
    ids=["top-k", "top-p", "min-p", "bias", "penalties"],
)
def test_every_sampling_parameter(sampling: SamplingParams) -> None:
    """The verifier's distribution equals that of `Sampler.shape`, path by path; the same holds for the draft's."""
    check(("serial", 3, 1, 2, 3, 1, 3), sampling, 3)
    check(("async", 2, 1, 1, 2, 2, 3), sampling, 4)


@pytest.mark.parametrize(
    ("case", "bs", "d"),
    [
        (("serial", 4, 1, 2, 3, 1, 3), 3, None),
        (("serial", 4, 1, 2, 3, 2, 2), 2, 1),
        (("async", 6, 1, 1, 2, 2, 3), 4, None),
        (("async", 4, 1, 2, 2, 2, 3), 3, 1),
    ],
    ids=str,
)
def test_texts_of_requests_with_a_smaller_shape(
    case: tuple[str, int, int, int, int, int, int], bs: int, d: int | None
) -> None:
    """The draft proposes no more nodes than requested; no sampled child is removed."""
    check(case, SamplingParams(temperature=0.8, verify_batch=bs, draft_steps=d), 1)


@pytest.mark.slow
def test_ties_are_broken_by_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """A uniform draft: all weights of a depth are equal, except for rounding of their sums."""
    pair = Pair(3, 5, plan_of("serial", 4, 2, 2), PLAIN, sharpness=0.0)
    apart, runs = pair.enumerate(monkeypatch, 1, 3)
    assert apart < 1e-12 and runs > 100
    for q in np.random.default_rng(2).dirichlet(np.full(5, 0.7), 20):
        rows = np.array(list(itertools.permutations(q)))
        first = sampled_children.child_log_weights(rows, 0.2)
        assert (first[:, 0] == first[0, 0]).all()


@pytest.mark.slow
def test_a_restarted_tree_follows_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled_children, "MAX_REROOTS", 0)
    check(("async", 2, 1, 1, 2, 3, 4), PLAIN, 2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", fast_first(["async", "serial"], 1))
def test_rounds_without_the_draft_keep_the_distribution(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """After a first round the drafter pauses for one round, then receives the tokens of the meantime."""
    pair = Pair(2, 3, plan_of(mode, 3, 1, 2), PLAIN)
    pair.around = lambda drafter: Controller(drafter, cache(lambda kind: RoundStats(pair.plan)))
    monkeypatch.setattr(DraftBudget, "settle", lambda self, gain: None)  # the rounds must not depend on the clock
    monkeypatch.setattr(policy, "decide", lambda measured: Decision(2, 3, not measured.speculating))
    assert pair.enumerate(monkeypatch, 3, 4)[0] < 1e-12


def test_pruning_by_sampled_likelihood_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pruning sampled children by their own likelihood, the mistake that the weights avoid."""

    def own(q: sampled_children.Floats, exponent: float) -> sampled_children.Floats:
        return np.log(q)

    monkeypatch.setattr(sampled_children, "child_log_weights", own)
    apart, _ = Pair(3, 1, plan_of("serial", 3, 1, 2), PLAIN).enumerate(monkeypatch, 1, 3)
    assert apart > 0.02


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_independent_coins_with_the_longest_branch_are_detected(
    monkeypatch: pytest.MonkeyPatch, case: tuple[str, int, int, int, int, int, int]
) -> None:
    """The rule of tests/support/biased_acceptance.py."""
    mode, bs, w, d, vocab, rounds, tokens = case
    pair = Pair(vocab, 1, plan_of(mode, bs, w, d), PLAIN)
    pair.outcomes = longest_branch
    assert pair.enumerate(monkeypatch, rounds, tokens)[0] > 0.01


@pytest.mark.parametrize("exponent", [0.25, 1.0, 3.0])
def test_weights_depend_only_on_earlier_children(exponent: float) -> None:
    q = np.random.default_rng(1).dirichlet(np.full(6, 0.5), 40)
    q[::3, 4:] = 0
    q[::5, 1:] = 0
    base = sampled_children.child_log_weights(q, exponent)
    assert (base <= 0).all() and not np.isnan(base).any() and (np.isfinite(base) <= (q > 0)).all()
    assert (np.diff(np.nan_to_num(base, neginf=-1e9), axis=1) <= 0).all()
    for i in range(3):  # another token at index i: the weights up to its own are unchanged
        other = q.copy()
        other[:, [i, i + 1]] = q[:, [i + 1, i]]
        alive = (q[:, i] > 0) & (q[:, i + 1] > 0)
        np.testing.assert_allclose(
            sampled_children.child_log_weights(other, exponent)[alive, : i + 1], base[alive, : i + 1], rtol=1e-9
        )


def test_children_follow_q_without_replacement() -> None:
    q, rows, count = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]), 4000, 6
    draws, sampler = SampledChildren(2, rows, 5, carry=True), Sampler(SamplingParams(seed=7), (), 5, "cpu")
    draws.open(sampler, 100, 1.0)
    found: dict[tuple[int, ...], int] = {}
    names = torch.arange(10, 15).expand(rows, 5)
    for _ in range(count):
        tokens, _ = draws.sample(0, names, q.log().expand(rows, 5))
        for pair in tokens.tolist():
            found[tuple(pair)] = found.get(tuple(pair), 0) + 1
    square = 0.0
    for order, chance in orders(q.tolist(), 2):
        expected = chance * rows * count
        square += (found.pop((10 + order[0], 10 + order[1])) - expected) ** 2 / expected
    assert square < 31.3 and not found  # chi-square, 11 degrees of freedom, 0.1 %
    again = SampledChildren(2, 4, 5, carry=True)
    again.open(sampler, 100, 1.0)
    first, _ = again.sample(0, names[:4], q.log().expand(4, 5))
    again.open(sampler, 101, 1.0)
    assert not np.array_equal(first, again.sample(0, names[:4], q.log().expand(4, 5))[0])
