"""runtime/executors/graph.py on the CPU: which shapes are captured, and that a replay reads only its inputs.

The stand-in for a capture runs the forward again on the tensors that it was captured with, as a graph would; anything
that was not copied into them would still belong to the first batch. tests/gpu/test_graph.py uses real graphs.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch

from swiftspec.backends.reference import reference
from swiftspec.backends.unfused import unfused
from swiftspec.config import PopulationConfig
from swiftspec.model.batch import Batch, HostBatch
from swiftspec.model.loader import load_model
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors import ExecutorRequest
from swiftspec.runtime.executors.eager import EagerExecutor
from swiftspec.runtime.executors.graph import (
    CAPTURED_ROWS,
    BatchKey,
    GraphCache,
    GraphForwardExecutor,
    GraphInputs,
    RowOutputs,
)
from swiftspec.tree import mask as tree_mask
from tests.support.fake_cuda_graphs import Recorder, Rerun
from tests.support.history_models import HistoryModel
from tests.support.roles import make_runner, make_scheduler, request_start
from tests.support.thread_group import ThreadGroup, on_ranks, peers
from tests.support.tiny_checkpoints import make_checkpoint

CPU = torch.device("cpu")
PENALISED: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.3}


def random_batch(rows: int, width: int, seed: int, sequences: int = 1) -> HostBatch:
    noise = np.random.default_rng(seed)
    rows *= sequences
    tokens, positions, slots = noise.integers(0, 1 << 40, (3, rows))
    lengths, sequence = noise.integers(0, 1 << 40, sequences), np.arange(rows) * sequences // rows
    mask = noise.random((rows, width)) < 0.5
    return HostBatch(tokens, positions, slots, mask, sequence, lengths, blocks=sequences)


def test_a_reallocated_cache_frees_its_old_buffer_first() -> None:
    """Otherwise a change of the number of sequences would need memory for both buffers of keys."""
    graphs, keys = GraphCache(Rerun()), torch.zeros(2)
    old = ref(keys)
    for captures in (1, 1):
        graphs.bind(keys)
        graphs.ensure("set", 0, lambda: torch.zeros(1))
        assert graphs.captures == captures, "graphs of the same buffer are kept"
    del keys
    assert old() is None
    graphs.bind(torch.zeros(2))
    graphs.ensure("set", 0, lambda: torch.zeros(1))
    assert graphs.captures == 2


@pytest.mark.parametrize("sequences", [1, 2])
def test_every_input_is_copied_and_padding_rows_repeat_the_last(sequences: int) -> None:
    inputs = GraphInputs(BatchKey(8, 16, blocks=sequences), sequences, CPU)
    for rows, seed in ((8, 0), (5, 1), (1, 2)):
        batch = random_batch(rows, 16, seed, sequences)
        inputs.fill(batch)
        placed = batch.to(CPU)
        for field in fields(Batch):
            if field.name in ("max_kv_len", "chain", "hidden", "num_logits", "blocks"):
                continue
            want, got = getattr(placed, field.name), getattr(inputs.batch, field.name)
            if field.name != "kv_len":
                each = want.unflatten(0, (sequences, rows))
                want = torch.cat((each, each[:, -1:].expand(-1, 8 - rows, *want.shape[1:])), 1).flatten(0, 1)
            assert torch.equal(got, want), field.name


def test_a_few_shapes_cover_all_numbers_of_rows() -> None:
    capture = Rerun()
    graphs = GraphCache(capture)

    def forwards(batch: HostBatch) -> list[float]:
        found, hidden = graphs.run_batch("forwards", batch, lambda placed: (placed.tokens.float(), None), CPU)
        assert hidden is None
        return found.tolist()

    for rows in range(1, CAPTURED_ROWS[-1] + 1):
        batch = random_batch(rows, 8, rows)
        assert forwards(batch) == torch.from_numpy(batch.tokens).float().tolist()
    assert capture.captures == len(CAPTURED_ROWS) and capture.replays == CAPTURED_ROWS[-1]
    forwards(random_batch(3, 16, 0))
    assert capture.captures == len(CAPTURED_ROWS) + 1


def test_graphs_are_dropped_with_their_buffer_or_their_set() -> None:
    graphs, buffers = GraphCache(Rerun()), [torch.zeros(3), torch.zeros(3)]

    def captured(name: int, buffer: int = 0) -> int:
        before = graphs.captures
        graphs.bind(buffers[buffer])
        graphs.ensure(name, "key", lambda: buffers[buffer] + 1)
        return graphs.captures - before

    assert [captured(0), captured(1), captured(0), captured(1)] == [1, 1, 0, 0]
    assert captured(0, 1) == 1, "graphs know the buffer by its address"
    graphs.evict(0)
    assert captured(0, 1) == 1 and captured(0, 1) == 0


def test_a_complete_graph_set_pads_smaller_batches() -> None:
    """On the right by rows, on the left by slots that all rows attend to. A set that is not complete captures them."""
    graphs = GraphCache(Rerun())

    def work(placed: Batch) -> RowOutputs:
        return (placed.tokens + placed.mask.sum(1) / 1024).double(), None

    def run(rows: int, width: int) -> int:
        batch, before = random_batch(rows, width, 7), graphs.captures
        found, _ = graphs.run_batch("forwards", batch, work, CPU)
        padding = graphs.batch_key("forwards", batch).width - width
        seen = torch.from_numpy(batch.mask).sum(1) + padding
        assert torch.equal(found, (torch.from_numpy(batch.tokens) + seen / 1024).double())
        return graphs.captures - before

    assert [run(8, 8), run(8, 16), run(8, 32), run(3, 16)] == [1, 1, 1, 1]
    graphs.mark_complete("forwards")
    assert [run(rows, width) for rows, width in ((3, 16), (2, 8), (8, 16), (5, 32), (1, 32))] == [0] * 5
    assert run(16, 8) == 1, "no captured batch is as large"
    graphs.bind(torch.zeros(1))
    assert run(2, 8) == 1


def test_the_run_before_a_capture_restores_the_state() -> None:
    graphs, state = GraphCache(Rerun()), torch.zeros(2)
    for count in (1, 2, 3):
        graph = graphs.ensure("rounds", "key", lambda: state.add_(1), [state])
        graph.replay()
        assert graph.out.tolist() == [count, count]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graph")
    make_checkpoint(path)
    return path


def test_a_runner_with_graphs_equals_one_without(checkpoint: Path) -> None:
    """Rounds of trees of changing size: logits, and the whole cache except unused slots."""
    capture = Rerun()
    model = load_model(checkpoint, dtype=torch.float64, ops=unfused, max_positions=160)
    plain, graphed = (make_runner(model, unfused, context=96, tree_slots=32) for _ in range(2))
    steps = EagerExecutor(plain), GraphForwardExecutor(graphed, GraphCache(capture))
    for kind in steps:
        kind.open(ExecutorRequest(kind.runner.sampler(SamplingParams(), ())))
    noise, prefix = np.random.default_rng(3), noise_tokens(41)
    for runner in (plain, graphed):
        runner.prefill(prefix)
    for rows in (1, 3, 8, 2, 7, 8):
        tokens, parents = noise.integers(0, 64, rows), [-1, *(int(noise.integers(0, i)) for i in range(1, rows))]
        mask = tree_mask.from_parents(parents)
        path = [0, *([node for node in range(1, rows) if parents[node] == 0][:1])]
        want, got = (kind.forward(kind.runner.tree_batch(tokens, mask.sum(1) - 1, mask)) for kind in steps)
        assert (want - got).abs().max() < 1e-12
        for runner in (plain, graphed):
            runner.cache.commit(path)
    assert (plain.cache.kv.k - graphed.cache.kv.k).abs().max() < 1e-12
    assert capture.captures == 4 and capture.replays == 6  # 1, 2, 4 and 8 rows, all of width 8


def test_a_graph_is_captured_for_each_power_of_two_of_slots(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph holds the number of slots that attention reads. Here 15 to 33 slots in use take 16, 32 and 64."""
    monkeypatch.setattr(unfused, "MIN_BUCKET_SLOTS", 16)
    capture = Recorder()
    model = load_model(checkpoint, dtype=torch.float64, ops=unfused, max_positions=160)
    plain, graphed = (make_runner(model, unfused, context=96, tree_slots=32) for _ in range(2))
    steps = EagerExecutor(plain), GraphForwardExecutor(graphed, GraphCache(capture, unfused.capture_bucket))
    tokens, mask = noise_tokens(33), tree_mask.causal(1)
    for kind in steps:
        kind.open(ExecutorRequest(kind.runner.sampler(SamplingParams(), ())))
        kind.runner.prefill(tokens[:14])
    for token in tokens[14:]:
        batches = [kind.runner.tree_batch(np.array([token]), np.zeros(1, np.int64), mask) for kind in steps]
        want, got = (kind.forward(batch) for kind, batch in zip(steps, batches, strict=True))
        assert (want - got).abs().max() < 1e-12
        for runner in (plain, graphed):
            runner.cache.commit([0])
    assert capture.captures == 3 and capture.replays == 19


@pytest.mark.slow
def test_rounds_are_captured_for_each_power_of_two_of_slots(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replays that read too few slots would change the text."""
    monkeypatch.setattr(unfused, "MIN_BUCKET_SLOTS", 16)
    make_checkpoint(tmp_path, layers=1, seed=5)
    models = [load_model(path, dtype=torch.float64, ops=unfused, max_positions=400) for path in (checkpoint, tmp_path)]
    capture, found = Recorder(), []
    for captured in (capture, None):
        pair = [make_runner(model, unfused, context=120, tree_slots=256) for model in models]
        plan = PopulationConfig(2, 2, 0.8, 1.5)
        worker = make_scheduler(pair[0], pair[1], plan, max_tokens=60, captures=(captured, captured))
        worker.open(request_start(noise_tokens(5), SamplingParams(temperature=0.8, seed=3)), set(), 50)
        while worker.launch():
            worker.collect()
        found.append((worker.executor.name, worker.answer().tokens))
    assert [name for name, _ in found] == ["graph", "eager"] and found[0][1] == found[1][1]
    assert 3 <= capture.captures < capture.replays


@pytest.mark.parametrize("exact", [0, 1])
def test_a_population_with_graphs_equals_one_without(exact: int) -> None:
    """Requests with other seeds replay the same graphs; other logits parameters, which graphs hold by value, capture
    new ones."""
    captures, workers = [Rerun(), None], []
    for capture in captures:
        models = HistoryModel(3, 1), HistoryModel(3, 2)
        pair = [make_runner(model, reference, context=40, tree_slots=256) for model in models]
        plan = PopulationConfig(3, 2, 0.7, 1.0, exact)
        workers.append(make_scheduler(pair[0], pair[1], plan, max_tokens=20, captures=(capture, capture)))
    shaped: list[dict[str, Any]] = [{}, {}, {"logit_bias": {1: 0.5}}, {"logit_bias": {1: -0.5}}, PENALISED, PENALISED]
    counts = []
    for number, more in enumerate(shaped):
        sampling = SamplingParams(temperature=0.8 if number < 4 else 1.2, seed=number // 2, **more)
        for worker in workers:
            worker.open(request_start([0, 1, 2], sampling), {1}, 18)
            while worker.launch():
                worker.collect()
        graphed, plain = (worker.answer() for worker in workers)
        assert graphed.tokens == plain.tokens and graphed.log_z == pytest.approx(plain.log_z)
        assert (graphed.ess_mean, graphed.resample_rate) == (plain.ess_mean, plain.resample_rate)
        assert captures[0] is not None
        counts.append(captures[0].captures)
    widths = counts[0]
    assert counts[3] > counts[2] > counts[0] and captures[0].replays > counts[-1] and widths <= 4


@pytest.mark.parametrize(
    "more",
    [{}, *(pytest.param(more, marks=pytest.mark.slow) for more in ({"top_k": 9, "top_p": 0.9}, PENALISED))],
    ids=str,
)
def test_rounds_of_a_group_of_ranks_equal_those_of_one(checkpoint: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    """Two ranks whose logits a kernel gathers capture whole rounds; where messages are too long for it they run
    operator by operator. The second request replays what the first has captured."""
    make_checkpoint(tmp_path, layers=1, seed=5)
    longest = 9 * 64 * 4  # bytes of the target's logits in a round

    def answers(group: ThreadGroup | None, most: int = longest) -> list[tuple[str, list[int], str]]:
        joined = None if group is None else peers(group, most)
        runners = []
        for path in (checkpoint, tmp_path):
            model = load_model(path, dtype=torch.float64, ops=unfused, max_positions=400, group=joined)
            runners.append(make_runner(model, unfused, context=64, tree_slots=256))
        capture = None if group is None else Rerun()
        plan = PopulationConfig(3, 2, 0.8, 1.5)
        worker = make_scheduler(runners[0], runners[1], plan, max_tokens=40, captures=(capture, capture))
        found = []
        for seed in (1, 2):
            sampling = SamplingParams(temperature=0.8, seed=seed, **more)
            worker.open(request_start([3, 1, 4, 1, 5], sampling), {7}, 14)
            while worker.launch():
                worker.collect()
            answer = worker.answer()
            found.append((worker.executor.name, answer.tokens, f"{answer.log_z:.9f}"))
        assert capture is None or (capture.captures > 1) == (found[0][0] == "graph")
        return found

    alone, (one, other) = answers(None), on_ranks(2, answers)
    assert one == other and [name for name, *_ in one] == ["graph"] * 2
    assert [each[1:] for each in one] == [each[1:] for each in alone]
    if not more:
        assert on_ranks(2, lambda group: answers(group, longest - 1)) == [alone] * 2


def noise_tokens(count: int) -> list[int]:
    return np.random.default_rng(0).integers(0, 64, count).tolist()
