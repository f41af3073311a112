"""`DRAFTERS`: how each kind of drafter is built, and which wrappers surround it.

A new drafter is a file of its own and an entry here. If users select it by name, it has a row in drafter_kinds.py, too,
and its limits are in capabilities.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from swiftspec.builder.plan import draft_tree_slots
from swiftspec.config import EngineConfig
from swiftspec.control.controller import Controller
from swiftspec.control.row_times import RowTimes
from swiftspec.control.shared_stats import SharedStats
from swiftspec.control.step_times import SteppedDrafter
from swiftspec.distributed.remote.client import DraftLink, RemoteDrafter, RemoteTreeDeltaLink
from swiftspec.distributed.remote.failover import FailoverDrafter, RemoteDraft
from swiftspec.distributed.remote.served_roles import streams_tree_deltas
from swiftspec.distributed.transport.request_state import ModelLimits
from swiftspec.model.block_head import BlockHead
from swiftspec.model.draft_head import DraftHead
from swiftspec.model.spec import DraftHeadSpec
from swiftspec.runtime.drafter import Drafter, NoDrafter
from swiftspec.runtime.executors import available
from swiftspec.runtime.executors.available import ExecutorDeps
from swiftspec.runtime.executors.block import BlockExecutor
from swiftspec.runtime.executors.head import HeadExecutor
from swiftspec.runtime.fallback_drafter import FallbackDrafter
from swiftspec.runtime.head_drafter import BlockDrafter, HeadDrafter
from swiftspec.runtime.local_drafter import LocalDrafter
from swiftspec.runtime.lookahead_drafter import LookaheadDrafter
from swiftspec.runtime.replica_drafter import ReplicaDrafter
from swiftspec.runtime.runner import Runner
from swiftspec.runtime.suffix_drafter import SharedLookup, SuffixDrafter
from swiftspec.runtime.target_states import TargetStates
from swiftspec.runtime.verifier import LocalVerifier
from swiftspec.tree.children import ChildSelector, TopChildren
from swiftspec.tree.replica import TreeReplica
from swiftspec.tree.sampled_children import SampledChildren
from swiftspec.tree.tree import DraftTree


@dataclass(frozen=True, slots=True)
class DrafterInputs:
    """What a drafter is built from: the parts that its kind needs.

    `config`: configuration of the engine, or of a worker's session.
    `limits`: those of requests.
    `model`: runner of the draft model in this process, and the dependencies of its executors.
    `verifier`: on the target in this process.
    `target_times`: times of its verifications; None: not measured.
    `link`: connection to the process that runs the draft model.
    `lookup`: what suffix lookup shares with that of other requests; None: there are none.
    """

    config: EngineConfig
    limits: ModelLimits | None = None
    model: tuple[Runner, ExecutorDeps] | None = None
    verifier: LocalVerifier | None = None
    target_times: RowTimes | None = None
    link: DraftLink | None = None
    lookup: SharedLookup | None = None


@dataclass(frozen=True, slots=True)
class WrapperInputs:
    """What the wrappers of a drafter are built from.

    `remote`: the drafter, if it is in another process.
    `suffix`: proposes after the drafter has failed, and with grafting adds to its proposals; None: only the root is
        proposed then.
    `stats`: measurements for the controller.
    """

    config: EngineConfig
    remote: RemoteDraft | None
    suffix: SuffixDrafter | None
    stats: SharedStats


Wrapper = Callable[[Any, WrapperInputs], Drafter]  # returns the drafter that surrounds another one, or that one itself


@dataclass(frozen=True, slots=True)
class DrafterEntry:
    """A kind of drafter.

    `needs`: what it runs on. model: a draft model in this process; link: a connection to a process that has one.
    `build`: returns the drafter.
    `wrappers`: those that surround it, the innermost first.
    """

    needs: Literal["nothing", "model", "link"]
    build: Callable[[DrafterInputs], SteppedDrafter]
    wrappers: Sequence[Wrapper]


def drafter_key(config: EngineConfig, head: DraftHeadSpec | None = None) -> str:
    """Returns the key in DRAFTERS of the drafter of rank 0, or of a single process. `head`: of the draft, if that is
    a draft head."""
    apart = config.draft_remote or (config.mode == "async" and config.draft_tp > 0)
    if not (config.has_draft_model and apart):
        return local_drafter_key(config, head)
    return "tree deltas" if config.draft_remote and streams_tree_deltas(config) else "remote"


def local_drafter_key(config: EngineConfig, head: DraftHeadSpec | None = None) -> str:
    """Returns the key in DRAFTERS for a process that runs the draft itself. See `drafter_key`."""
    if config.mode == "ar":
        return "none"
    if config.drafts_without_model:
        return config.drafter
    if head is not None:
        return "head"
    return "lookahead" if config.mode == "async" else "model"


def build_drafter(runner: Runner, deps: ExecutorDeps, config: EngineConfig) -> LocalDrafter:
    """Returns a drafter on a model of this process, for the mode of `config`."""
    executors, tree = available.draft_executors(runner, deps, config)
    children: ChildSelector = TopChildren(config.children_per_leaf, config.proposal == "coupled")
    if config.proposal == "sample":
        children = SampledChildren(
            config.children_per_leaf, runner.tree_slots, runner.vocab, carry=config.verify == "reject"
        )
    kind = LookaheadDrafter if config.mode == "async" else LocalDrafter
    return kind(runner, executors, tree, children, config)


def _model(given: DrafterInputs) -> LocalDrafter:
    assert given.model is not None
    return build_drafter(*given.model, given.config)


def _head(given: DrafterInputs) -> HeadDrafter:
    """Returns a drafter on a draft head, which reads the hidden states of the target in this process."""
    assert given.model is not None and given.verifier is not None
    (runner, _), config, target = given.model, given.config, given.verifier
    head = runner.model
    assert isinstance(head, DraftHead | BlockHead)
    states = target.states = TargetStates(head)
    children = TopChildren(config.children_per_leaf, config.proposal == "coupled")
    if isinstance(head, BlockHead):
        block = BlockExecutor(runner, head.block, states)
        return BlockDrafter(
            runner,
            block,
            tree=DraftTree(config.max_nodes, 1),
            children=children,
            config=config,
            states=states,
            target=target.runner,
        )
    tree = DraftTree(1 + runner.tree_slots * config.children_per_leaf, runner.tree_slots)
    return HeadDrafter(
        runner,
        HeadExecutor(runner, states),
        tree=tree,
        children=children,
        config=config,
        states=states,
        target=target.runner,
    )


def build_suffix_drafter(given: DrafterInputs) -> SuffixDrafter:
    """Returns a drafter by suffix lookup, which is also the spare of other drafters."""
    assert given.limits is not None
    times, most = given.target_times, given.config.max_nodes
    row_seconds = None if times is None else [times.at(rows) for rows in range(1, most + 1)]
    return SuffixDrafter(most, given.limits.max_model_len, row_seconds, given.lookup)


def _remote(given: DrafterInputs) -> RemoteDrafter:
    assert given.link is not None
    return RemoteDrafter(given.link, given.config.initial_draft_steps)


def _replica(given: DrafterInputs) -> ReplicaDrafter:
    assert given.link is not None and given.limits is not None
    slots = draft_tree_slots(given.config)
    tree = DraftTree(1 + slots * given.config.children_per_leaf, slots)
    return ReplicaDrafter(RemoteTreeDeltaLink(given.link), TreeReplica(tree, given.limits.vocab_size), given.config)


def adapt(drafter: SteppedDrafter, given: WrapperInputs) -> SteppedDrafter | Controller:
    """Surrounds the drafter with a controller, if the configuration is adaptive or grafts suffix lookup."""
    config, stats = given.config, given.stats
    if not (config.is_adaptive or config.grafts_suffix):
        return drafter
    suffix = given.suffix if config.grafts_suffix else None
    return Controller(drafter, stats.of, suffix=suffix, keep_budget=stats.keep)


def fall_back(drafter: Drafter, given: WrapperInputs) -> FallbackDrafter:
    """Continues without a drafter of this process that has failed."""
    return FallbackDrafter(drafter, given.suffix)


def fail_over(drafter: Any, given: WrapperInputs) -> FailoverDrafter:
    """Continues without a drafter in another process that is late or lost, until it is back."""
    assert given.remote is not None
    return FailoverDrafter(drafter, given.remote, given.suffix)


DRAFTERS = {
    "none": DrafterEntry("nothing", lambda given: NoDrafter(), [fall_back]),
    "suffix": DrafterEntry("nothing", build_suffix_drafter, [fall_back]),
    "model": DrafterEntry("model", _model, [adapt, fall_back]),
    "lookahead": DrafterEntry("model", _model, [adapt, fall_back]),
    "head": DrafterEntry("model", _head, [adapt, fall_back]),
    "remote": DrafterEntry("link", _remote, [adapt, fail_over]),
    "tree deltas": DrafterEntry("link", _replica, [adapt, fail_over]),
}
