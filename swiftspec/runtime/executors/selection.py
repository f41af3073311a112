"""Which kinds of steps a model can use, the fastest first: what its operators, its device and its group allow.

Which of them runs a request follows from the features that they take (`TreeExecutor.supports`), and from nothing else.
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
    """What operators say of themselves."""

    MAX_CAPTURED_SEQUENCES: (
        int  # with so many sequences, at most, a forward touches the host nowhere, so it can be a graph
    )

    def device_tree(
        self, slots: int, children: int, leaves: int, vocab: int, device: torch.device, /
    ) -> DeviceTreeLike | None:
        """A tree that grows without the host; None where there is none, or not of that shape."""
        ...


class ExecutorDeps:
    """What faster steps are made of. `fused`: the model as one native call; `capture`: how its graphs are captured;
    None: it cannot."""

    def __init__(self, ops: ExecutorOps, fused: NativeModel | None, capture: Capture | None) -> None:
        self.ops, self.fused = ops, fused
        self.graphs = GraphCache(capture) if capture is not None else None


def target_executors(runner: Runner, deps: ExecutorDeps) -> list[TreeExecutor]:
    """Those that verify."""
    executors: list[TreeExecutor] = []
    if deps.fused is not None:
        executors.append(NativeExecutor(runner, deps.fused))
    graphs = deps.graphs
    if graphs is not None and _captures(runner, 1):
        guided = deps.ops.MAX_CAPTURED_SEQUENCES > 1
        if _captures(runner, CAPTURED_ROWS[-1], TOP_CANDIDATES + 1):  # what a vocabulary's shards exchange
            executors.append(GraphVerificationExecutor(runner, graphs, guided))
        executors.append(GraphForwardExecutor(runner, graphs, guided))
    return [*executors, EagerExecutor(runner)]


def draft_executors(runner: Runner, deps: ExecutorDeps, config: EngineConfig) -> tuple[list[TreeExecutor], DraftTree]:
    """Those that expand, and the tree that they do it with."""
    executors: list[TreeExecutor] = []
    slots, leaves, children = runner.tree_slots, config.draft_leaves, config.children_per_leaf
    tree = DraftTree(1 + slots * children, slots)
    if deps.fused is not None:
        tree = NativeTree(1 + slots * children, slots, deps.fused)
        executors.append(NativeExecutor(runner, deps.fused))
    graphs = deps.graphs
    if graphs is not None and _captures(runner, 1):
        on_device = deps.ops.device_tree(slots, children, leaves, runner.vocab, runner.model.device)
        # children, their scores and a sum for each leaf, which a vocabulary's shards exchange
        if on_device is not None and _captures(runner, leaves, 2 * children + 1, dtype=torch.float64):
            executors.append(GraphExpansionExecutor(runner, graphs, on_device))
        executors.append(GraphForwardExecutor(runner, graphs))
    return [*executors, EagerExecutor(runner)], tree


def population_executors(
    target: Runner, draft: Runner, deps: ExecutorDeps, draft_deps: ExecutorDeps, config: PopulationConfig
) -> list[PopulationExecutor]:
    """Those that run rounds of groups of particles, which are both models' at once."""
    executors: list[PopulationExecutor] = []
    alone, groups = target.model.group is None, config.smc_groups
    fused = deps.fused, draft_deps.fused
    if alone and fused[0] is not None and fused[1] is not None and config.smc_exact == 0:
        executors.append(NativePopulationExecutor(target, draft, (fused[0], fused[1]), config))
    sequences = min(deps.ops.MAX_CAPTURED_SEQUENCES, draft_deps.ops.MAX_CAPTURED_SEQUENCES)
    if groups <= max(sequences, 1) and deps.graphs is not None and draft_deps.graphs is not None:
        rows = min(
            groups * config.slots_per_round, PREFILL_CHUNK_TOKENS
        )  # of a forward, whose whole logits a group's ranks gather
        if all(_captures(runner, rows, runner.vocab) for runner in (target, draft)):
            executors.append(GraphPopulationExecutor(deps.graphs))
    return [*executors, EagerPopulationExecutor()]


def _captures(runner: Runner, *message: int, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a graph may hold the model's sums, and the gathering of messages of that shape."""
    group = runner.model.group
    if group is None:
        return True
    longest: Tensor = torch.empty(message, dtype=dtype, device=runner.model.device)
    return group.captures(longest)
