"""A draft's expansions on the device against the same ones with the host in between; on a CPU.

Stand-ins: a capture that runs the expansions again, and the two kernels of csrc/cuda/tree in Python on the tensors that
they are given. tests/native/test_cuda_code.py compares the kernels' own code with the host's tree.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swiftspec.backends.cuda import tree as cuda_tree
from swiftspec.backends.unfused import unfused
from swiftspec.config import EngineConfig
from swiftspec.model.batch import Batch
from swiftspec.model.loader import load_model
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors.graph import BatchShape, GraphInputs
from swiftspec.runtime.executors.graph_expansions import GraphExpansionExecutor, binary_parts, powers_of_two
from swiftspec.runtime.graph_capture import capture_graphs, num_captures
from swiftspec.runtime.local_drafter import LocalDrafter
from tests.support.cases import fast_first
from tests.support.fake_cuda_graphs import Rerun, RerunWithoutReads, inside_kernel
from tests.support.roles import make_drafter, make_runner, request_start
from tests.support.same_rounds import folded_counts, same_rounds, weights_by_path
from tests.support.thread_group import ThreadGroup, on_ranks, peers
from tests.support.tiny_checkpoints import make_checkpoint

W, K, D = 3, 4, 3


class CudaTree:
    """As defined in csrc/cuda/tree/tree.h."""

    def __init__(self, *, children: int, **arrays: Tensor) -> None:
        views = {name: array.numpy() for name, array in arrays.items()}
        self.token, self.parent, self.slot, self.weight = (views[n] for n in ("token", "parent", "slot", "weight"))
        self.visible, self.used = views["visible"], views["used"]
        self.node, self.tokens, self.positions = views["node"], views["tokens"], views["positions"]
        self.slots, self.mask = views["slots"], views["mask"]
        self.children = children

    @inside_kernel()
    def leaves(self, prefix: Tensor, _: int) -> None:
        w, start, (count, first) = len(self.node), int(prefix[0]), self.used.tolist()
        leaves = [i for i in range(count) if self.slot[i] < 0 and self.weight[i] > -np.inf]
        chosen = sorted(leaves, key=lambda i: (-self.weight[i], i))[:w]
        for row in range(w):
            mine, seen = first + row, np.zeros(len(self.visible), np.bool_)
            i = chosen[row] if row < len(chosen) else -1
            if i > 0:
                seen |= self.visible[self.slot[self.parent[i]]]
            self.positions[row] = start + int(seen.sum())
            seen[mine] = True
            self.visible[mine] = self.mask[row] = seen
            self.node[row], self.slots[row] = i, start + mine
            self.tokens[row] = 0 if i < 0 else self.token[i]
        for row, i in enumerate(chosen):
            self.slot[i] = first + row
        self.used[1] = first + w

    @inside_kernel()
    def add(self, tokens: Tensor, values: Tensor, _: int) -> None:
        assert tokens.shape == values.shape == (len(self.node), self.children)
        for row, parent in enumerate(self.node.tolist()):
            if parent < 0:
                continue
            new = slice(int(self.used[0]), int(self.used[0]) + self.children)
            self.token[new], self.parent[new], self.slot[new] = tokens[row].numpy(), parent, -1
            self.weight[new] = self.weight[parent] + values[row].numpy()
            self.used[0] += self.children

    @inside_kernel()
    def root(self, token: Tensor, slot: Tensor, region: Tensor, tokens: Tensor, values: Tensor, _: int) -> None:
        assert tokens.shape == values.shape == (1, self.children)
        start, new = int(slot[0]), slice(1, 1 + self.children)
        self.token[0], self.parent[0], self.slot[0], self.weight[0] = int(token[0]), 0, 0, 0.0
        self.token[new], self.parent[new], self.slot[new] = tokens[0].numpy(), 0, -1
        self.weight[new], self.used[:] = values[0].numpy(), (1 + self.children, 1)
        self.visible[0] = np.arange(len(self.visible)) == 0
        region.numpy()[:] = start, start + len(self.visible)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rounds")
    make_checkpoint(path)
    return path


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_tree, "_C", SimpleNamespace(CudaTree=CudaTree, Tree=cuda_tree._C.Tree))
    monkeypatch.setattr(cuda_tree, "current_stream", lambda: 0)
    monkeypatch.setattr(cuda_tree, "use_current_device", lambda: None)


def drafters(checkpoint: Path, config: EngineConfig, group: Any = None) -> tuple[LocalDrafter, LocalDrafter, Rerun]:
    """One that synchronises with the host, one that does not."""
    model = load_model(checkpoint, dtype=torch.float32, ops=unfused, max_positions=256, group=group)
    with_tree = unfused.with_operators(device_tree=cuda_tree.device_tree)
    capture = RerunWithoutReads() if group is None else Rerun()
    runners = [make_runner(model, ops, context=128, tree_slots=8 * W * D) for ops in (unfused, with_tree)]
    return make_drafter(runners[0], config), make_drafter(runners[1], config, capture), capture


def grown(drafter: LocalDrafter) -> list[int]:
    """Returns the numbers of expansions that a drafter has graphs of."""
    kinds = [kind for kind in drafter.executors if isinstance(kind, GraphExpansionExecutor)]
    counts: list[Any] = [count for kind in kinds for count in kind.graphs._graph_sets.get("expansions", {})]
    return sorted(counts)


def copies(drafter: LocalDrafter, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Returns a list to which every phase of expansions appends its copies between host and device."""
    phases: list[list[str]] = []
    [executor] = [kind for kind in drafter.executors if isinstance(kind, GraphExpansionExecutor)]
    for owner, name in ((executor._tree, "upload"), (executor._tree, "download"), (GraphInputs, "fill")):
        whole: Any = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, whole=whole, name=name: (phases[-1].append(name), whole(*a))[1])
    expand: Any = executor.expand
    monkeypatch.setattr(executor, "expand", lambda *a: (phases.append([]), expand(*a))[1])
    return phases


SAMPLING = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, seed=5),
    SamplingParams(temperature=0.8, seed=5, top_p=0.9),
    SamplingParams(temperature=0, repetition_penalty=1.2),
]


# every pair of a sampling, a mode and a proposal
ROUNDS = [
    (SAMPLING[0], "serial", "coupled"), (SAMPLING[1], "async", "coupled"),
    (SAMPLING[1], "serial", "top"), (SAMPLING[0], "async", "top"),
    (SAMPLING[2], "serial", "coupled"), (SAMPLING[3], "async", "coupled"),
    (SAMPLING[3], "serial", "top"), (SAMPLING[2], "async", "top"),
]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("sampling", "mode", "proposal"), fast_first(ROUNDS[::-1], 1, unpack=True))
def test_rounds_equal_those_that_synchronise_with_the_host(
    checkpoint: Path, sampling: SamplingParams, mode: Any, proposal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = EngineConfig(mode=mode, verify_batch=K, draft_leaves=W, draft_steps=D, proposal=proposal)
    host, ours, capture = drafters(checkpoint, plan)
    moved = copies(ours, monkeypatch)
    same_rounds(host, ours, sampling, 64)
    assert ours.executor.name == "graph" and grown(ours) and capture.captures > 0
    assert {"fill", "download"} <= {name for calls in moved for name in calls} <= {"upload", "fill", "download"}
    for calls in moved:
        assert len(calls) == 2 and calls[1] == "download", "one copy to the device and one back, in every phase"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["serial", "async"])
def test_a_hybrid_expands_the_same_tree_without_the_host(
    tmp_path: Path, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when positions are folded between the rounds."""
    make_checkpoint(tmp_path, family="qwen3_5_text")
    host, ours, capture = drafters(tmp_path, EngineConfig(mode=mode, verify_batch=K, draft_leaves=W, draft_steps=D))
    folded = folded_counts(ours.runner, monkeypatch)
    same_rounds(host, ours, SAMPLING[1], 64, rounds=10, prompt_len=54)
    assert ours.executor.name == "graph" and grown(ours) and capture.captures > 0 and {0, 32} <= folded


@pytest.mark.slow
@pytest.mark.parametrize(("size", "sampling"), fast_first(product((2, 3), SAMPLING[1::-1]), 1, unpack=True))
def test_a_group_expands_the_same_tree_without_the_host(checkpoint: Path, size: int, sampling: SamplingParams) -> None:
    """On every rank, and as a group with the host does; all ranks capture equally often."""
    plan = EngineConfig(mode="async", verify_batch=K, draft_leaves=W, draft_steps=D)

    def work(group: ThreadGroup) -> tuple[int, int, list[dict[tuple[int, ...], float]]]:
        host, ours, capture = drafters(checkpoint, plan, peers(group, 1 << 16))
        same_rounds(host, ours, sampling, 64)
        assert grown(ours)
        ours.open(request_start([1, 2, 3], sampling, request=0))
        return capture.captures, capture.replays, [weights_by_path(ours.propose())]

    found = on_ranks(size, work)
    assert all(one == found[0] for one in found)


def test_a_group_whose_messages_are_too_long_runs_phase_by_phase(checkpoint: Path) -> None:
    plan = EngineConfig(verify_batch=K, draft_leaves=W, draft_steps=D)
    longest = 8 * W * (2 * K + 1)

    def work(group: ThreadGroup) -> list[str]:
        made = [drafters(checkpoint, plan, peers(group, most))[1] for most in (longest - 1, longest)]
        return [drafter.select_executor(request_start([1], SAMPLING[0])).name for drafter in made]

    assert on_ranks(2, work) == [["graph forwards", "graph"]] * 2


@pytest.mark.slow
def test_requests_capture_no_graph_after_the_start(checkpoint: Path) -> None:
    """Over a mix of temperatures, biases and numbers of expansions. The calibration is the configuration's."""
    config = EngineConfig(verify_batch=K, draft_leaves=W, draft_steps=7, calibration=1.7)
    host, ours, capture = drafters(checkpoint, config)
    capture_graphs(None, ours, config, None)
    before = capture.captures
    assert grown(ours) == [1, 2, 4] and before == num_captures(None, ours)
    for number, sampling in enumerate([*SAMPLING, replace(SAMPLING[1], logit_bias={3: 2.0, 9: -1.0}, min_tokens=3)]):
        host.draft_steps = ours.draft_steps = 7 - number
        same_rounds(host, ours, sampling, 64, rounds=4)
    assert capture.captures == before


def test_captures_at_the_start_run_over_the_tree_region(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(verify_batch=K, draft_leaves=W, draft_steps=2)
    _, ours, _ = drafters(checkpoint, config)
    lengths, forward = list[Tensor](), GraphExpansionExecutor.model_forward

    def noted(executor: GraphExpansionExecutor, batch: Batch) -> Any:
        if batch.mask.shape[1] == ours.tree.slots and len(batch) == W:
            lengths.append(batch.kv_len.clone())
        return forward(executor, batch)

    monkeypatch.setattr(GraphExpansionExecutor, "model_forward", noted)
    [executor] = [kind for kind in ours.executors if isinstance(kind, GraphExpansionExecutor)]
    for capture in executor.expansion_captures(2, [BatchShape(1, 1)]):
        capture()
    assert {int(length) for length in lengths} == {ours.tree.slots}


def test_the_parts_of_a_number_of_expansions() -> None:
    assert [binary_parts(count) for count in (1, 6, 7, 8)] == [[1], [4, 2], [4, 2, 1], [8]]
    for most in range(1, 20):
        assert {part for count in range(1, most + 1) for part in binary_parts(count)} == {*powers_of_two(most)}
