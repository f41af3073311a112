"""Which executors a model can use, the fastest first, given its operators, its device and its group.

Which of them runs a request depends only on the features that they support (`Executor.supports`).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.runtime.executors import TreeExecutor
from swiftspec.runtime.executors.eager import EagerExecutor
from swiftspec.runtime.executors.graph import CAPTURED_ROWS, Capture, GraphCache, GraphForwardExecutor
from swiftspec.runtime.executors.graph_expansions import DeviceTreeLike, GraphExpansionExecutor
from swiftspec.runtime.executors.graph_verifications import GraphVerificationExecutor
from swiftspec.runtime.executors.native import NativeExecutor, NativeModel, NativeTree
from swiftspec.runtime.executors.native_population import NativePopulationExecutor
from swiftspec.runtime.executors.population_rounds import (
    EagerPopulationExecutor,
    GraphPopulationExecutor,
    PopulationExecutor,
)
from swiftspec.runtime.runner import PREFILL_CHUNK_TOKENS, Runner
from swiftspec.sampling.vocab import TOP_CANDIDATES
from swiftspec.tree.tree import DraftTree


class ExecutorOps(Protocol):
    """The capabilities that a backend declares."""

    MAX_CAPTURED_SEQUENCES: int  # a forward over up to this many sequences can be captured; 0: never

    def device_tree(
        self, slots: int, children: int, leaves: int, vocab: int, device: torch.device, /
    ) -> DeviceTreeLike | None:
        """A tree that is expanded on the device; None if the backend has none, or none of that shape."""
        ...


class ExecutorDeps:
    """What the faster executors are built from.

    `fused`: the model as one native call; None if the backend has none.
    `capture`: captures CUDA graphs; None if graphs are not supported.
    """

    def __init__(self, ops: ExecutorOps, fused: NativeModel | None, capture: Capture | None) -> None:
        self.ops, self.fused = ops, fused
        self.graphs = GraphCache(capture) if capture is not None else None


def target_executors(runner: Runner, deps: ExecutorDeps) -> list[TreeExecutor]:
    """The executors that can verify."""
    executors: list[TreeExecutor] = []
    if deps.fused is not None:
        executors.append(NativeExecutor(runner, deps.fused))
    graphs = deps.graphs
    if graphs is not None and _captures(runner, 1):
        guided = deps.ops.MAX_CAPTURED_SEQUENCES > 1
        if _captures(runner, CAPTURED_ROWS[-1], TOP_CANDIDATES + 1):  # the message that vocabulary shards exchange
            executors.append(GraphVerificationExecutor(runner, graphs, guided))
        executors.append(GraphForwardExecutor(runner, graphs, guided))
    return [*executors, EagerExecutor(runner)]


def draft_executors(runner: Runner, deps: ExecutorDeps, config: EngineConfig) -> tuple[list[TreeExecutor], DraftTree]:
    """The executors that can expand, and the tree that they expand."""
    executors: list[TreeExecutor] = []
    slots, leaves, children = runner.tree_slots, config.draft_leaves, config.children_per_leaf
    tree = DraftTree(1 + slots * children, slots)
    if deps.fused is not None:
        tree = NativeTree(1 + slots * children, slots, deps.fused)
        executors.append(NativeExecutor(runner, deps.fused))
    graphs = deps.graphs
    if graphs is not None and _captures(runner, 1):
        on_device = deps.ops.device_tree(slots, children, leaves, runner.vocab, runner.model.device)
        # vocabulary shards exchange children, their scores and a sum per leaf
        if on_device is not None and _captures(runner, leaves, 2 * children + 1, dtype=torch.float64):
            executors.append(GraphExpansionExecutor(runner, graphs, on_device))
        executors.append(GraphForwardExecutor(runner, graphs))
    return [*executors, EagerExecutor(runner)], tree


def population_executors(
    target: Runner, draft: Runner, deps: ExecutorDeps, draft_deps: ExecutorDeps, config: PopulationConfig
) -> list[PopulationExecutor]:
    """The executors that can run population rounds, which use both models."""
    executors: list[PopulationExecutor] = []
    alone, groups = target.model.group is None, config.smc_groups
    fused = deps.fused, draft_deps.fused
    if alone and fused[0] is not None and fused[1] is not None and config.smc_exact == 0:
        executors.append(NativePopulationExecutor(target, draft, (fused[0], fused[1]), config))
    sequences = min(deps.ops.MAX_CAPTURED_SEQUENCES, draft_deps.ops.MAX_CAPTURED_SEQUENCES)
    if groups <= max(sequences, 1) and deps.graphs is not None and draft_deps.graphs is not None:
        rows = min(
            groups * config.slots_per_round, PREFILL_CHUNK_TOKENS
        )  # of a forward, whose whole logits the ranks of a group gather
        if all(_captures(runner, rows, runner.vocab) for runner in (target, draft)):
            executors.append(GraphPopulationExecutor(deps.graphs))
    return [*executors, EagerPopulationExecutor()]


def _captures(runner: Runner, *message: int, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a graph may contain the model's all-reduces, and an all-gather of messages of that shape."""
    group = runner.model.group
    if group is None:
        return True
    largest: Tensor = torch.empty(message, dtype=dtype, device=runner.model.device)
    return group.captures(largest)
