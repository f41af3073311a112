"""Which kinds of steps a model can use, the fastest first: what its operators, its device and its group allow.

Which of them runs a request follows from the features that they take (`Steps.takes`), and from nothing else.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from swiftspec.config import EngineConfig, PopulationConfig
from swiftspec.runtime.executors import Steps
from swiftspec.runtime.executors.eager import EagerSteps
from swiftspec.runtime.executors.graph import ROWS, Capture, GraphForwards, Graphs
from swiftspec.runtime.executors.graph_expansions import DeviceTree, GraphExpansions
from swiftspec.runtime.executors.graph_verifications import GraphVerifications
from swiftspec.runtime.executors.native import NativeModel, NativeSteps, NativeTree
from swiftspec.runtime.executors.native_population import NativeRounds
from swiftspec.runtime.executors.population_rounds import EagerRounds, GraphRounds, Rounds
from swiftspec.runtime.runner import PREFILL_CHUNK, Runner
from swiftspec.sampling.vocab import HEAD
from swiftspec.tree.tree import DraftTree


class Ops(Protocol):
    """What operators say of themselves."""

    CAPTURES: int  # with so many sequences, at most, a forward touches the host nowhere, so it can be a graph

    def device_tree(
        self, slots: int, children: int, leaves: int, vocab: int, device: torch.device, /
    ) -> DeviceTree | None:
        """A tree that grows without the host; None where there is none, or not of that shape."""
        ...


class Tools:
    """What faster steps are made of. `fused`: the model as one native call; `capture`: how its graphs are captured;
    None: it cannot."""

    def __init__(self, ops: Ops, fused: NativeModel | None, capture: Capture | None) -> None:
        self.ops, self.fused = ops, fused
        self.graphs = Graphs(capture) if capture is not None else None


def for_target(runner: Runner, tools: Tools) -> list[Steps]:
    """Those that verify."""
    found: list[Steps] = []
    if tools.fused is not None:
        found.append(NativeSteps(runner, tools.fused))
    graphs = tools.graphs
    if graphs is not None and _captures(runner, 1):
        guided = tools.ops.CAPTURES > 1
        if _captures(runner, ROWS[-1], HEAD + 1):  # what a vocabulary's shards exchange
            found.append(GraphVerifications(runner, graphs, guided))
        found.append(GraphForwards(runner, graphs, guided))
    return [*found, EagerSteps(runner)]


def for_draft(runner: Runner, tools: Tools, config: EngineConfig) -> tuple[list[Steps], DraftTree]:
    """Those that expand, and the tree that they do it with."""
    found: list[Steps] = []
    slots, leaves, children = runner.tree_slots, config.draft_leaves, config.children
    tree = DraftTree(1 + slots * children, slots)
    if tools.fused is not None:
        tree = NativeTree(1 + slots * children, slots, tools.fused)
        found.append(NativeSteps(runner, tools.fused))
    graphs = tools.graphs
    if graphs is not None and _captures(runner, 1):
        on_device = tools.ops.device_tree(slots, children, leaves, runner.vocab, runner.model.device)
        # children, their scores and a sum for each leaf, which a vocabulary's shards exchange
        if on_device is not None and _captures(runner, leaves, 2 * children + 1, dtype=torch.float64):
            found.append(GraphExpansions(runner, graphs, on_device))
        found.append(GraphForwards(runner, graphs))
    return [*found, EagerSteps(runner)], tree


def for_population(
    target: Runner, draft: Runner, tools: Tools, draft_tools: Tools, config: PopulationConfig
) -> list[Rounds]:
    """Those that run rounds of groups of particles, which are both models' at once."""
    found: list[Rounds] = []
    alone, groups = target.model.group is None, config.smc_groups
    fused = tools.fused, draft_tools.fused
    if alone and fused[0] is not None and fused[1] is not None and config.smc_exact == 0:
        found.append(NativeRounds(target, draft, (fused[0], fused[1]), config))
    sequences = min(tools.ops.CAPTURES, draft_tools.ops.CAPTURES)
    if groups <= max(sequences, 1) and tools.graphs is not None and draft_tools.graphs is not None:
        rows = min(groups * config.slots, PREFILL_CHUNK)  # of a forward, whose whole logits a group's ranks gather
        if all(_captures(runner, rows, runner.vocab) for runner in (target, draft)):
            found.append(GraphRounds(tools.graphs))
    return [*found, EagerRounds()]


def _captures(runner: Runner, *message: int, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a graph may hold the model's sums, and the gathering of messages of that shape."""
    group = runner.model.group
    if group is None:
        return True
    longest: Tensor = torch.empty(message, dtype=dtype, device=runner.model.device)
    return group.captures(longest)
