"""Lists the executors that a model can use, the fastest first, given its operators, its device and its group.

Which executor of a list runs a request depends only on the features that it supports (`select_executor`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from swiftspec.backends.reference import Backend
from swiftspec.config import EngineConfig
from swiftspec.runtime.executors import TreeExecutor
from swiftspec.runtime.executors.eager import EagerExecutor
from swiftspec.runtime.executors.graph import (
    CAPTURED_ROWS,
    MAX_JOINT_ROWS,
    Capture,
    GraphCache,
    GraphForwardExecutor,
    JointGraphExecutor,
    chain_shapes,
    joint_shapes,
    padded_rows,
    tree_shapes,
)
from swiftspec.runtime.executors.graph_expansions import DeviceTreeLike, GraphExpansionExecutor
from swiftspec.runtime.executors.graph_verifications import GraphVerificationExecutor
from swiftspec.runtime.executors.native import NativeExecutor, NativeModel
from swiftspec.runtime.executors.native_tree import NativeTree
from swiftspec.runtime.runner import Runner
from swiftspec.sampling.vocab import TOP_CANDIDATES
from swiftspec.tree.tree import DraftTree


class ExecutorDeps:
    """Dependencies of the executors of one model.

    `ops`: the model's backend.
    `fused`: the model in native code, for the native executors; None if the backend has none.
    `capture`: captures CUDA graphs, for the graph executors; None if they are not supported.
    """

    def __init__(self, ops: Backend, fused: NativeModel | None, capture: Capture | None) -> None:
        self.ops, self.fused = ops, fused
        self.graphs = GraphCache(capture, ops.capture_bucket) if capture is not None else None


def target_executors(runner: Runner, deps: ExecutorDeps) -> list[TreeExecutor]:
    """Returns the executors that can verify proposals, the fastest first."""
    executors: list[TreeExecutor] = []
    if deps.fused is not None:
        executors.append(NativeExecutor(runner, deps.fused))
    graphs = _forward_graphs(runner, deps)
    if graphs is not None:
        guided = deps.ops.MAX_CAPTURED_SEQUENCES > 1
        if can_capture(runner, CAPTURED_ROWS[-1], TOP_CANDIDATES + 1):  # largest message of `VocabShard.apply_filters`
            executors.append(GraphVerificationExecutor(runner, graphs, guided))
        executors.append(GraphForwardExecutor(runner, graphs, guided))
    return [*executors, EagerExecutor(runner)]


def draft_executors(runner: Runner, deps: ExecutorDeps, config: EngineConfig) -> tuple[list[TreeExecutor], DraftTree]:
    """Returns the executors that can expand the draft tree, the fastest first, and the tree."""
    executors: list[TreeExecutor] = []
    slots, leaves, children = runner.tree_slots, config.leaves_per_expansion, config.children_per_leaf
    tree = DraftTree(1 + slots * children, slots)
    if deps.fused is not None:
        tree = NativeTree(1 + slots * children, slots, deps.fused.tree)
        executors.append(NativeExecutor(runner, deps.fused))
    graphs = _forward_graphs(runner, deps)
    if graphs is not None:
        device = runner.model.device
        on_device: DeviceTreeLike | None = graphs.shared(
            "tree", lambda: deps.ops.device_tree(slots, children, leaves, runner.vocab, device)
        )
        # message of `VocabShard.log_top_k`: per leaf the children, their scores and one sum
        if on_device is not None and can_capture(runner, leaves, 2 * children + 1, dtype=torch.float64):
            tree = NativeTree(1 + slots * children, slots, on_device.host_tree)
            executors.append(GraphExpansionExecutor(runner, graphs, on_device))
        executors.append(GraphForwardExecutor(runner, graphs))
    return [*executors, EagerExecutor(runner)], tree


def joint_executor(runner: Runner, deps: ExecutorDeps, requests: int, rows: int) -> EagerExecutor:
    """Returns the executor of the forwards of concurrent requests. `runner`: on the cache with the sequences of all of
    them. `requests`, `rows`: largest number of requests, and of rows of each."""
    graphs = _forward_graphs(runner, deps)
    if graphs is None:
        return EagerExecutor(runner)
    return JointGraphExecutor(runner, graphs, max_rows=min(padded_rows(requests * rows), MAX_JOINT_ROWS))


def target_captures(executors: Sequence[TreeExecutor], config: EngineConfig) -> list[Callable[[], None]]:
    """Returns functions that capture the CUDA graphs of all verifications, one each; see
    `GraphForwardExecutor.forward_captures`. Requests with guidance, and rejection sampling, capture theirs when they
    need them."""
    shapes, found = chain_shapes(config.max_nodes), list[Callable[[], None]]()
    for kind in executors:
        if isinstance(kind, GraphVerificationExecutor):
            found += kind.verification_captures(shapes)
        elif isinstance(kind, GraphForwardExecutor):
            found += kind.forward_captures([*shapes, *joint_shapes(config.max_num_seqs, config.max_nodes, shapes)])
    return found


def draft_captures(executors: Sequence[TreeExecutor], config: EngineConfig, slots: int) -> list[Callable[[], None]]:
    """As `target_captures`, for the expansions of a draft tree of `slots` tree slots."""
    leaves, found = config.leaves_per_expansion, list[Callable[[], None]]()
    roots = chain_shapes(leaves + 1)  # a root is expanded with up to `leaves` pending tokens
    for kind in executors:
        if isinstance(kind, GraphExpansionExecutor):
            found += kind.expansion_captures(config.max_draft_steps, roots)
        elif isinstance(kind, GraphForwardExecutor):
            shapes = sorted({*roots, *tree_shapes(leaves, slots)})
            found += kind.forward_captures([*shapes, *joint_shapes(config.max_num_seqs, leaves + 1, shapes)])
    return found


def graph_captures(executors: Sequence[TreeExecutor]) -> int:
    """Returns the number of CUDA graphs that the executors of a role have captured."""
    return next((kind.graphs.captures for kind in executors if isinstance(kind, GraphForwardExecutor)), 0)


def _forward_graphs(runner: Runner, deps: ExecutorDeps) -> GraphCache | None:
    """Returns the graphs of a model's forwards, or None if it has none."""
    sequences = len(runner.cache.buffer_kv_len())
    if deps.graphs is None or sequences > deps.ops.MAX_CAPTURED_SEQUENCES or not can_capture(runner, 1):
        return None
    return deps.graphs


def can_capture(runner: Runner, *message: int, dtype: torch.dtype = torch.float32) -> bool:
    """Returns whether a CUDA graph can contain the collectives of a forward and an all-gather of a tensor of shape
    `message`. Always True without a group."""
    group = runner.model.group
    if group is None:
        return True
    largest: Tensor = torch.empty(message, dtype=dtype, device=runner.model.device)
    return group.captures(largest)
