"""Adaptation of d and bs during a request: the decisions for given rounds, and that the shape converges."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftspec.config import EngineConfig
from swiftspec.control.controller import SKIPPED_ROUNDS, Controller, _truncate
from swiftspec.control.cost_model import CostModel
from swiftspec.control.policy import decide
from swiftspec.control.round_stats import (
    NO_SPECULATION,
    PROBE_ROUNDS,
    RAISE_COOLDOWN_ROUNDS,
    WINDOW_ROUNDS,
    Decision,
    RoundSample,
    RoundStats,
)
from swiftspec.distributed.transport.codec import check_nodes
from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams
from swiftspec.tree import mask as tree_mask
from tests.support.cases import fast_first
from tests.support.proposals import proposals
from tests.support.roles import request_start

Hits = Callable[[int], tuple[int, ...]]  # round -> nodes on the accepted path


def serial_round(
    m: RoundStats, round_: int, hits: Hits, expansion: float, target: Callable[[int], float]
) -> RoundSample:
    """A round of serial decoding: nodes as deep as d and within bs count."""
    reached = hits(round_)[: m.steps]
    tokens = 1 + sum(place < m.nodes for place in reached)
    draft, verified = m.steps * expansion, target(m.nodes)
    return RoundSample(draft + verified + 0.1, verified, draft, tokens, reached)


def lookahead_round(
    m: RoundStats, round_: int, hits: Hits, expansion: float, target: Callable[[int], float]
) -> RoundSample:
    """A round of a lookahead drafter: of d expansions, d - 1 depths remain below the root."""
    reached = hits(round_)[: max(m.steps - 1, 1)]
    tokens = 1 + sum(place < m.nodes for place in reached)
    draft, verified = m.steps * expansion, target(m.nodes)
    wait = 0.1 + max(draft - verified, 0.0)
    return RoundSample(verified + wait, verified, draft, tokens, reached)


def run(measured: RoundStats, rounds: int, see: Callable[[RoundStats, int], RoundSample]) -> list[tuple[int, int]]:
    """The shapes of the rounds."""
    shapes = []
    for round_ in range(rounds):
        shapes.append((measured.steps, measured.nodes))
        measured.add(see(measured, round_))
        decision = decide(measured)
        if decision.speculate and decision != measured.current:
            measured.apply(decision)
    return shapes


def chain(*chances: float) -> Hits:
    """The text stays among the most likely nodes to a depth that is sampled with these probabilities; the same in every
    run."""

    def hits(round_: int) -> tuple[int, ...]:
        draw, depth = random.Random(round_), 0
        while depth < len(chances) and draw.random() < chances[depth]:
            depth += 1
        return tuple(range(1, depth + 1))

    return hits


def best(chances: Sequence[float], expansion: float, target: float) -> int:
    """The d with the highest throughput."""

    def speed(d: int) -> float:
        tokens, reach = 1.0, 1.0
        for chance in chances[:d]:
            reach *= chance
            tokens += reach
        return tokens / (0.1 + target + d * expansion)

    return max(range(1, 17), key=speed)


@pytest.mark.parametrize(
    ("chances", "expansion", "wanted"),
    [((0.95,) * 8, 0.5, (6, 9)), ((0.3, 0.2), 2.0, (1, 1)), ((0.9, 0.9), 1.0, (2, 2)), ((0.9, 0.6, 0.3), 2.0, (2, 3))],
)
def test_serial_d_follows_acceptance(chances: tuple[float, ...], expansion: float, wanted: tuple[int, int]) -> None:
    assert wanted[0] <= best(chances, expansion, 10.0) <= wanted[1]
    measured = RoundStats(EngineConfig("serial", verify_batch=16, adapt_steps=True))
    shapes = run(measured, 800, lambda m, r: serial_round(m, r, chain(*chances), expansion, lambda _: 10.0))
    late = [d for d, _ in shapes[300:]]
    assert sum(wanted[0] <= d <= wanted[1] for d in late) > 0.85 * len(late)


def test_serial_bs_shrinks_if_rows_are_expensive_and_depth_is_not_reached() -> None:
    """The text passes through the first three nodes at most; autoregressive rounds have shown that rows are
    expensive."""
    measured = RoundStats(EngineConfig("serial", adapt_batch=True, self_switch=True))

    def see(m: RoundStats, round_: int) -> RoundSample:
        return serial_round(m, round_, chain(0.9, 0.5, 0.3), 0.2, lambda rows: 1.0 + rows)

    shapes = run(measured, WINDOW_ROUNDS, see)
    assert set(shapes) == {(3, 8)} and decide(measured) == NO_SPECULATION, "what a plain round takes is not known"
    measured.apply(NO_SPECULATION)
    for _ in range(PROBE_ROUNDS):
        measured.add(RoundSample(2.1, 2.0, 0.0, 1, ()))
    assert decide(measured) == Decision(3, 2, True)
    measured.apply(decide(measured))
    assert set(run(measured, 200, see)[50:]) <= {(3, 2), (3, 4)}


def test_a_truncated_proposal_counts_as_a_whole_one() -> None:
    """Node 3 was not verified, but it is the target's bonus token."""
    drafter = FixedDrafter()
    measured = RoundStats(EngineConfig("serial", verify_batch=6, draft_steps=4, adapt_batch=True))
    measured.nodes = 3
    controller = Controller(drafter, lambda kind: measured, clock=lambda: 0.0)
    controller.open(request_start([0], SamplingParams()))
    at = 0
    for round_ in range(SKIPPED_ROUNDS + 2):
        proposal = controller.propose()
        assert (proposal.tokens, proposal.parents) == ((0, 11, 12), (-1, 0, 1))
        tokens = (11, 13) if round_ % 2 == 0 else (14,)
        controller.observe(VerifyResult(1, round_, at, tuple(range(len(tokens))), tokens))
        at += len(tokens)
    assert [tree.accepted_ranks for tree in controller.round_stats.speculative_rounds] == [(1, 3), ()]
    assert drafter.draft_steps == 4


@settings(deadline=None)
@given(proposals(), st.integers(1, 9))
def test_a_cut_proposal_has_the_nodes_with_the_largest_weights(proposal: Proposal, nodes: int) -> None:
    cut = _truncate(proposal, nodes)
    assert sorted(cut.weights) == sorted(proposal.weights)[-nodes:]
    assert check_nodes(cut.parents, cut.weights, cut.sources) == cut.sources, "connected"
    paths = [tree_mask.paths(each.tokens, each.parents) for each in (cut, proposal)]
    assert {*map(tuple, paths[0])} <= {*map(tuple, paths[1])}


@settings(deadline=None)
@given(proposals(), st.integers(1, 9))
def test_a_proposal_in_the_order_of_its_weights_is_cut_at_its_end(proposal: Proposal, nodes: int) -> None:
    """The order in which drafters propose."""
    ordered = replace(proposal, weights=tuple(sorted(proposal.weights, reverse=True)))
    names = ("tokens", "parents", "weights", "sources")
    assert _truncate(ordered, nodes) == replace(ordered, **{name: getattr(ordered, name)[:nodes] for name in names})


def test_the_ranks_of_accepted_nodes_are_by_weight() -> None:
    """Nodes of another source are at the end of the proposal, but may be likelier than those before them."""
    drafter = FixedDrafter((0.0, -1.0, -3.0, -1.5, -2.0))
    measured = RoundStats(EngineConfig("serial", verify_batch=6, draft_steps=4, adapt_batch=True))
    measured.nodes = 4
    controller = Controller(drafter, lambda kind: measured, clock=lambda: 0.0)
    controller.open(request_start([0], SamplingParams()))
    for round_ in range(SKIPPED_ROUNDS + 1):
        proposal = controller.propose()
        assert (proposal.tokens, proposal.parents) == ((0, 11, 13, 14), (-1, 0, 1, 2))
        controller.observe(VerifyResult(1, round_, 3 * round_, (0, 1, 2, 3), (11, 13, 14)))
    assert [tree.accepted_ranks for tree in controller.round_stats.speculative_rounds] == [(1, 2, 3)]


class FixedDrafter:
    """Proposes the same tree of five nodes."""

    busy, draft_steps, lost_reason = 0.0, 3, None

    def __init__(self, weights: Sequence[float] = (0.0, -1.0, -2.0, -2.0, -3.0)) -> None:
        self.weights = weights

    def open(self, start: RequestStart) -> None:
        self.round, self.at = 0, len(start.tokens) - 1

    def propose(self) -> Proposal:
        tree = (0, 11, 12, 13, 14), (-1, 0, 1, 1, 3)
        return Proposal.from_draft_model(1, self.round, self.at, *tree, self.weights)

    def grow(self) -> None: ...

    def observe(self, result: VerifyResult) -> None:
        self.round, self.at = result.round + 1, result.prefix_len + len(result.tokens)

    def close(self) -> None: ...


def ahead(m: RoundStats, target: float, expansion: float, extra: int = 0, turn: float = 0.2) -> RoundSample:
    """A round of asynchronous decoding."""
    late = max(m.steps * expansion - target, 0.0)
    wait = turn + late + extra * expansion
    return RoundSample(target + wait, target, (m.steps + extra) * expansion, 2, (1,))


@pytest.mark.parametrize(
    ("start", "target", "expansion", "wanted"),
    [(3, 10.48, 3.25, 3), (1, 10.48, 3.25, 3), (9, 10.48, 3.25, 3), (3, 10.0, 1.0, 9), (3, 1.0, 5.0, 1),
     (3, 100.0, 1.0, 16), (4, 13.1, 3.25, 4), (3, 13.1, 3.25, 3)],
)  # fmt: skip
def test_lookahead_d_follows_the_ratio_of_step_times(start: int, target: float, expansion: float, wanted: int) -> None:
    """Near a threshold, 3.97 here, d does not change."""
    measured = RoundStats(EngineConfig("async", draft_steps=start, adapt_steps=True))
    shapes = run(measured, 100, lambda m, r: ahead(m, target, expansion, extra=2 * (r % 3 == 0)))
    assert {d for d, _ in shapes[-40:]} == {wanted}
    assert len(set(shapes)) <= 3


def test_lookahead_target_waits_for_expansions_that_are_accepted() -> None:
    """Two expansions fit into a verification. With a high acceptance rate the target waits for a third one, otherwise
    not."""
    for chances, wanted in (((0.97,) * 6, (3, 4, 5)), ((0.5, 0.2), (2,))):
        measured = RoundStats(EngineConfig("async", draft_steps=2, adapt_steps=True))
        shapes = run(
            measured, 400, lambda m, r, chances=chances: lookahead_round(m, r, chain(*chances), 3.73, lambda _: 10.34)
        )
        late = [d for d, _ in shapes[200:]]
        assert sum(d in wanted for d in late) > 0.85 * len(late)


def test_lookahead_bs_shrinks_with_d_if_rows_are_expensive() -> None:
    measured = RoundStats(EngineConfig("async", draft_steps=9, adapt_steps=True, adapt_batch=True))
    measured.ar_seconds.append(4.0)
    law = chain(0.5, 0.1)
    shapes = run(measured, 400, lambda m, r: lookahead_round(m, r, law, 1.0, lambda rows: 4 + 6 * (rows - 1) / 7))
    assert {bs for _, bs in shapes[200:]} == {2} and {d for d, _ in shapes[200:]} <= {3, 4, 5}


SHAPES = st.tuples(st.integers(1, 16), st.sampled_from((8, 4, 2)))
ROUNDS = st.builds(
    lambda target, draft, wait, places: RoundSample(
        target + draft + wait, target, draft, 1 + len(places), tuple(sorted(places))
    ),
    st.floats(1e-6, 10), st.floats(0, 10), st.floats(0, 10), st.sets(st.integers(1, 7), max_size=7),
)  # fmt: skip


@given(SHAPES, st.lists(ROUNDS, min_size=1, max_size=60), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_decisions_are_within_the_limits(
    shape: tuple[int, int],
    rounds: list[RoundSample],
    steps_free: bool,
    batch_free: bool,
    ahead: bool,
    switches: bool,
) -> None:
    config = EngineConfig("async" if ahead else "serial", draft_steps=shape[0], self_switch=switches)
    measured = RoundStats(replace(config, adapt_steps=steps_free, adapt_batch=batch_free))
    measured.nodes = shape[1]
    for seen in rounds:
        measured.add(seen)
        before = deepcopy(measured)
        decision = decide(measured)
        assert decide(measured) == decision and measured == before, "it is a function of what was measured"
        if not decision.speculate:
            assert switches and decision == NO_SPECULATION
        else:
            assert decision.steps == shape[0] if not steps_free else 1 <= decision.steps <= 16
            assert decision.nodes == shape[1] if not batch_free else decision.nodes in (8, 4, 2)
        if decision != measured.current:
            measured.apply(decision)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "tenths", [(8, 7, 6, 5, 4, 3, 2, 1), (9,) * 8, (5,) * 8, (3, 2, 1, 0, 0, 0, 0, 0), (10,) * 8], ids=str
)
@pytest.mark.parametrize("expansion", [0.1, 0.5, 2.0])
@pytest.mark.parametrize(
    ("row", "start", "batch"), fast_first([(0.05, 3, 0), (0.5, 8, 2), (0.05, 8, 2), (0.5, 3, 0)], 2, unpack=True)
)
@pytest.mark.parametrize("ahead", [False, True])
def test_the_shape_converges_under_constant_conditions(
    tenths: tuple[int, ...], expansion: float, row: float, start: int, batch: int, ahead: bool
) -> None:
    """The shape converges, except for occasional trials."""
    mode = "async" if ahead else "serial"
    measured = RoundStats(EngineConfig(mode, draft_steps=start, adapt_steps=True, adapt_batch=True))
    measured.nodes = 8 >> batch
    measured.ar_seconds.append(1.0 + row)
    round_of = lookahead_round if ahead else serial_round

    def hits(round_: int) -> tuple[int, ...]:
        depth = next((i for i, t in enumerate(tenths) if (7 * round_ + 3 * i) % 10 >= t), 8)
        return tuple(min(2 * place + 1, 7) for place in range(depth))

    shapes = run(measured, 1000, lambda m, r: round_of(m, r, hits, expansion, lambda rows: 1.0 + row * rows))
    assert sum(a != b for a, b in pairwise(shapes[400:])) <= 10


@pytest.mark.parametrize("law", range(0, 600, 30))
def test_the_shape_converges_for_any_acceptance_and_step_times(law: int) -> None:
    """The same with random acceptance rates per depth and random step times."""
    draw = random.Random(law)
    chances, step = [draw.random() for _ in range(8)], draw.choice((1, 2))
    expansion, row = 10 ** draw.uniform(-1.5, 0.5), 10 ** draw.uniform(-2, 0)
    measured = RoundStats(EngineConfig("serial", adapt_steps=True, adapt_batch=True))
    measured.ar_seconds.append(1.0 + row)

    def hits(round_: int) -> tuple[int, ...]:
        again, depth = random.Random(1000 * round_ + law), 0
        while depth < 8 and again.random() < chances[depth]:
            depth += 1
        return tuple(min(step * place + 1, 7) for place in range(depth))

    shapes = run(measured, 1000, lambda m, r: serial_round(m, r, hits, expansion, lambda rows: 1.0 + row * rows))
    assert sum(a != b for a, b in pairwise(shapes[400:])) <= 13


def test_the_forecast_of_the_current_shape_equals_the_measurement() -> None:
    measured = RoundStats(EngineConfig("serial", adapt_steps=True))
    for round_ in range(WINDOW_ROUNDS):
        measured.add(serial_round(measured, round_, chain(0.9, 0.6, 0.3), 2.0, lambda _: 10.0))
    trees = measured.speculative_rounds
    rate = sum(tree.tokens for tree in trees) / sum(tree.seconds for tree in trees)
    assert CostModel(measured).tokens_per_second(3, 8) == pytest.approx(rate)


def test_a_larger_d_predicts_no_depth_beyond_bs() -> None:
    measured = RoundStats(EngineConfig("serial", draft_steps=1, adapt_steps=True, adapt_batch=True))
    measured.nodes = 2
    for _ in range(WINDOW_ROUNDS):
        measured.add(RoundSample(2.0, 1.0, 1.0, 2, (1,)))
    forecast = CostModel(measured)
    assert forecast.tokens_per_round(3, 2) == forecast.tokens_per_round(1, 2) == 2
    assert (
        2
        < forecast.tokens_per_round(2, 4)
        < forecast.tokens_per_round(3, 4)
        == forecast.tokens_per_round(16, 4)
        < forecast.tokens_per_round(4, 8)
        < 6
    )


def test_a_failed_increase_is_not_repeated_soon() -> None:
    """The first depth is always accepted, a second one never: every trial of d = 2 ends after its first evaluation."""
    measured = RoundStats(EngineConfig("serial", draft_steps=1, adapt_steps=True))
    steps = [d for d, _ in run(measured, 1000, lambda m, r: serial_round(m, r, chain(1.0), 0.1, lambda _: 1.0))]
    raised = [at for at, (before, after) in enumerate(pairwise(steps)) if after > before]
    assert len(raised) > 5 and min(b - a for a, b in pairwise(raised)) >= RAISE_COOLDOWN_ROUNDS


@pytest.mark.parametrize(("batch", "wanted"), [(12, {12, 6, 3}), (8, {8, 4, 2}), (3, {3}), (1, {1})])
def test_bs_falls_to_its_minimum_if_nothing_is_accepted(batch: int, wanted: set[int]) -> None:
    """Rows are expensive and nothing is accepted: bs falls to its minimum."""
    measured = RoundStats(EngineConfig("serial", verify_batch=batch, adapt_batch=True))
    measured.ar_seconds.append(1.0)
    shapes = run(measured, 200, lambda m, _: RoundSample(m.nodes + 1.0, m.nodes, 1.0, 1, ()))
    assert measured.nodes == min(wanted) and {bs for _, bs in shapes} <= wanted
