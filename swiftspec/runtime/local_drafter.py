"""The drafter that grows its tree on a model in this process, in turn with the target (paper section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from swiftspec.messages import Proposal, RequestStart, VerifyResult
from swiftspec.runtime.executors import ExecutorRequest, ExpansionShape, TreeExecutor, features_of, select_executor
from swiftspec.runtime.runner import Runner
from swiftspec.tree.children import ChildSelector
from swiftspec.tree.tree import DraftTree


class TreeConfig(Protocol):
    """The shape of the tree; `EngineConfig` has it."""

    @property
    def verify_batch(self) -> int: ...  # bs
    @property
    def draft_leaves(self) -> int: ...  # w
    @property
    def children_per_leaf(self) -> int: ...  # k
    @property
    def initial_draft_steps(self) -> int: ...  # d
    @property
    def proposal(self) -> str | None: ...
    def calibration_for(self, greedy: bool) -> float:
        """The temperature that makes a child's weight the chance that the target agrees."""
        ...


class LocalDrafter:
    """Grows the tree between the target's forwards (serial decoding).

    The model's cache holds the prefix of verified tokens before the root, then the expanded nodes. `pending` are
    verified tokens before the root whose draft KV is missing, because the target accepted a node that was never
    expanded here. They go with the root's forward, or are prefilled when there are more than w.
    """

    def __init__(
        self,
        runner: Runner,
        executors: Sequence[TreeExecutor],
        tree: DraftTree,
        children: ChildSelector,
        config: TreeConfig,
    ) -> None:
        """`executors`: those that can expand `tree`, the fastest first."""
        self.runner, self.tree, self.executors = runner, tree, executors
        self._children, self._config = children, config
        self.draft_steps = config.initial_draft_steps  # d, unless a request has its own
        self.pending: list[int] = []
        self._root = 0  # node that is the root by now; `settle` makes it node 0

    @property
    def busy(self) -> float:
        return self.runner.busy

    @property
    def expansions(self) -> int:
        """d of this request."""
        return self._request_steps or self.draft_steps

    def select_executor(self, opening: RequestStart) -> TreeExecutor:
        """The steps that run a request."""
        drawn = ("drawn proposals",) if self._children.sampled else ()
        return select_executor(self.executors, features_of(opening.sampling, *drawn), opening.executor)

    def open(self, opening: RequestStart) -> None:
        config, sampling = self._config, opening.sampling
        self._nodes, self._request_steps = sampling.verify_batch or config.verify_batch, sampling.draft_steps
        self._request, self._round = opening.request, 0
        self._root_at = len(opening.tokens) - 1  # absolute position
        self.pending, self._root = [], 0
        sampler = self._sampler = self.runner.sampler(sampling, opening.prompt)
        sampler.observe(opening.output)
        tau = config.calibration_for(sampling.greedy)
        self._children.open(sampler, self._root_at, tau)
        self.runner.open(opening.tokens, max_cached=opening.num_cached_tokens)
        self.tree.reset(opening.tokens[-1])
        coupled = config.proposal == "coupled" and not sampling.greedy
        count = min(config.children_per_leaf, self.runner.vocab)
        self.executor = self.select_executor(opening)
        shape = ExpansionShape(config.draft_leaves, count, coupled, tau, self._children.rank)
        self.executor.open(ExecutorRequest(sampler, expansion=shape))

    def propose(self) -> Proposal:
        self.expand(self.expansions)
        return self._best_proposal()

    def grow(self) -> None:
        pass  # in turn: the tree grows after the result

    def fast_reply(self) -> Any:
        """What can answer the next result by itself, as `observe` and `propose` would; None where that takes Python."""
        return None

    def observe(self, result: VerifyResult) -> None:
        self.settle()
        self._sampler.observe(result.tokens)
        self.runner.observe(result.tokens)
        self._reroot(result.tokens)
        self._root_at += len(result.tokens)
        self._round = result.round + 1

    def settle(self) -> None:
        """Re-roots tree and cache where `observe` only noted the new root; a proposal need not wait for that."""
        if self._root != 0:
            path, kept = self.tree.reroot(self._root)
            self.runner.cache.commit(path, kept)
            self._root = 0
            self._children.retain_slots(kept)

    def close(self) -> None:
        self.runner.cache.commit(())  # what is verified stays

    def expand(self, count: int = 1) -> None:
        """Expands the tree `count` times, or fewer where there is no room."""
        self.settle()
        if len(self.pending) > self._config.draft_leaves:
            self.runner.prefill(self.pending)
            self.pending.clear()
        self.executor.expand(self.tree, self.pending, count)

    def _best_proposal(self, first: int = 0) -> Proposal:
        nodes, tokens, parents = self.tree.best_subtree(self._nodes, self._root, first)
        carried = None
        if self._children.sampled and len(nodes) > 1:
            above = np.unique(np.array(parents[1:], np.int64))
            carried = self._children.draft_probs(self.tree.slot[np.array(nodes)[above]])
        return Proposal(self._request, self._round, self._root_at, tuple(tokens), tuple(parents), carried)

    def _reroot(self, tokens: Sequence[int]) -> None:
        """Walks the verified tokens down the tree; the sub-tree under the last of them stays."""
        path = [0, *self.tree.match_prefix(tokens)]
        if len(path) > len(tokens) and self._children.reroot():  # all of them are nodes
            self._root = path[-1]
            return
        # The last token, and perhaps more, is not in the tree: a fresh root. The nodes on the way have KV if expanded.
        spelled = [int(self.tree.token[0]), *tokens[:-1]]
        slots = [slot for slot in self.tree.slot[path[: len(tokens)]].tolist() if slot < self.tree.slots]
        self.runner.cache.commit(slots)
        self.pending += spelled[len(slots) :]
        self.tree.reset(tokens[-1])
        self._children.retain_slots([])
