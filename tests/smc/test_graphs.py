"""Captured rounds of sequence groups equal eager ones, and their graphs serve requests with other parameters.

Stand-ins for CUDA graphs (tests/support/fake_cuda_graphs.py); tests/gpu/test_smc_graph.py uses real ones.
"""

from __future__ import annotations

from typing import Any

import pytest

from swiftspec.backends.reference import reference
from swiftspec.config import PopulationConfig
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors.graph import GraphCache
from swiftspec.runtime.graph_capture import run_captures
from swiftspec.smc.executors import EagerPopulationExecutor, GraphPopulationExecutor
from swiftspec.smc.group_result import GroupResult
from swiftspec.smc.scheduler import BatchScheduler
from tests.support.fake_cuda_graphs import Recorder
from tests.support.history_models import HistoryModel
from tests.support.roles import make_runner, request_start

VOCAB, GROUPS = 13, 4
PLAIN: list[dict[str, Any]] = [{}, {"temperature": 0.6}, {"temperature": 1.4, "seed": 5}]
FILTERED: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_k": 5, "top_p": 0.8}, {"temperature": 1.4, "top_p": 0.7}]
OTHERS: list[dict[str, Any]] = [{"logit_bias": {3: 2.0}}, {"presence_penalty": 1.0}, {"min_tokens": 3, "top_k": 4}]


def scheduler(graphs: GraphCache | None, exact: int = 0) -> BatchScheduler:
    """A scheduler whose rounds all run as graphs, or eagerly without them."""
    config = PopulationConfig(3, 2, 0.8, 1.0, exact, smc_groups=GROUPS)
    models = (HistoryModel(VOCAB, seed) for seed in (1, 2))
    target, draft = (make_runner(model, reference, context=64, tree_slots=128) for model in models)
    executor = EagerPopulationExecutor() if graphs is None else GraphPopulationExecutor(graphs)
    return BatchScheduler(target, draft, [executor], config, max_tokens=12)


def answers(worker: BatchScheduler, *shapes: dict[str, Any]) -> list[GroupResult]:
    """The answers of requests that are decoded concurrently."""
    groups = []
    for i, shape in enumerate(shapes):
        sampling = SamplingParams(**{"temperature": 1.0, "seed": i} | shape)
        groups.append(worker.admit(request_start([1 + i, 2, 3][: 1 + i], sampling), (0,), 6 + 2 * i))
    while worker.step():
        pass
    found = [worker.finish(group) for group in groups]
    for group in groups:
        worker.evict_group(group)
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("exact", [0, 2])
def test_graphs_captured_ahead_serve_usual_requests(exact: int) -> None:
    graphs = GraphCache(Recorder())
    eager, captured = scheduler(None, exact), scheduler(graphs, exact)
    run_captures(captured.captures(), None)
    ahead = graphs.captures
    # classes with and without filters; windows of 16, 32 and 64 slots; 1, 2 and 4 groups
    assert ahead == 2 * 3 * 3
    for shapes in (PLAIN, FILTERED, PLAIN[1:], FILTERED[:1], PLAIN[2:]):
        assert answers(captured, *shapes) == answers(eager, *shapes)
    assert graphs.captures == ahead


def test_a_mix_of_requests_drops_no_graphs() -> None:
    """Each combination of classes has graphs, whatever the order of its requests and the values of their parameters."""
    graphs = GraphCache(Recorder())
    eager, captured = scheduler(None), scheduler(graphs)
    mixes = [[*PLAIN[:1], *FILTERED[:1], *OTHERS[:2]], OTHERS, [*PLAIN[:2], *OTHERS[2:]]]
    for mix in mixes:
        assert answers(captured, *mix) == answers(eager, *mix)
    before = graphs.captures
    assert before > 0
    for mix in mixes:
        assert answers(captured, *mix) == answers(eager, *mix)
    # the requests change places
    others = [FILTERED[1], OTHERS[1] | {"presence_penalty": 0.5}, PLAIN[2], {"logit_bias": {4: 1.0}}]
    longest = [{**shape, "seed": 9} for shape in others]
    assert answers(captured, *longest) == answers(eager, *longest)
    assert graphs.captures - before <= 4, "only for windows and numbers of groups that the first mix did not have"
