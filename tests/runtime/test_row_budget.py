"""The row budget of a joint verification, and what suffix lookups of concurrent requests share."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftspec.messages import VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.runtime.coroutines import CallQueue
from swiftspec.runtime.row_budget import MIN_GAIN_FACTOR, RowBudget
from swiftspec.runtime.suffix_drafter import SharedLookup, SuffixDrafter
from tests.support.roles import request_start

WEIGHTS = st.lists(st.floats(-12, 0), max_size=6).map(lambda each: sorted(each, reverse=True))
GREEDY = SamplingParams(temperature=0)


def budget_for(requests: int, row_cost: float) -> RowBudget:
    calls = CallQueue()
    calls.num_requests, calls.company = requests, requests > 1
    return RowBudget(calls, lambda rows: 1 + row_cost * rows)


@settings(deadline=None)
@given(st.lists(WEIGHTS, min_size=1, max_size=4), st.floats(0.01, 2), st.integers(0, 8), st.integers(0, 3))
def test_the_likeliest_nodes_that_pay_are_verified(
    weights: list[list[float]], row_cost: float, least: int, others: int
) -> None:
    """`others`: requests that verify only their roots."""
    requests = len(weights) + others
    counts = budget_for(requests, row_cost).choose(weights, least)
    assert all(0 <= count <= len(each) for count, each in zip(counts, weights, strict=True))
    chosen = [weight for count, each in zip(counts, weights, strict=True) for weight in each[:count]]
    left = [weight for count, each in zip(counts, weights, strict=True) for weight in each[count:]]
    assert min(chosen, default=0) >= max(left, default=-12)
    ranked = sorted(chosen + left, reverse=True)

    def speed(nodes: int) -> float:
        return (requests + sum(map(exp, ranked[:nodes])) / MIN_GAIN_FACTOR) / (1 + row_cost * (requests + nodes))

    least = min(least, len(ranked))
    assert len(chosen) >= least
    best = max(speed(nodes) for nodes in range(least, len(ranked) + 1))
    assert speed(len(chosen)) == pytest.approx(best)


def test_company_takes_rows_from_a_request_and_leaves_it_those_that_others_do_not_need() -> None:
    likely, unlikely = [log(0.9)] * 6, [log(0.3)] * 6
    alone = budget_for(1, 0.2).choose([unlikely], 0)
    assert alone == [6] and budget_for(2, 0.2).choose([likely, unlikely], 0) == [6, 0]
    assert budget_for(2, 0.2).choose([likely, unlikely], 8) == [6, 2]


def open_on(drafter: SuffixDrafter, text: list[int], sampling: SamplingParams = GREEDY) -> None:
    drafter.open(request_start(text, sampling))


@pytest.mark.parametrize("remembers", [True, False])
def test_a_text_of_another_request_is_found_once_it_has_ended(remembers: bool) -> None:
    shared = SharedLookup(budget_for(1, 0.0))
    first, second = (SuffixDrafter(8, 256, shared=shared) for _ in range(2))
    open_on(first, [*range(40)], replace(GREEDY, suffix_memory=remembers))
    first.propose()
    first.observe(VerifyResult(1, 0, 39, (0, 1), (77, 78)))
    for ended in (False, True):
        open_on(second, [7, 8, *range(20, 40)])
        assert second.propose().tokens[1:3] == ((77, 78) if ended and remembers else ())
        if not ended:
            first.close()
    assert shared.texts_after(1, second) == (int(remembers), [])


def test_concurrent_requests_choose_all_nodes_together_and_a_single_one_its_own() -> None:
    calls = CallQueue()
    shared = SharedLookup(RowBudget(calls, lambda rows: float(rows)))  # rows that cost a forward each
    drafter = SuffixDrafter(8, 256, [1.0] * 8, shared)
    open_on(drafter, [7] * 40)
    assert len(drafter.propose().tokens) == 8
    calls.company, calls.num_requests = True, 2
    assert len(drafter.find().tokens) == 8 and len(drafter.share().tokens) == 1
