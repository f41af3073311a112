"""The serial drafter: expands its tree on a model in this process, alternately with the target (paper section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from swiftspec.capabilities import Features
from swiftspec.messages import NodeSource, Proposal, RequestStart, VerifyResult
from swiftspec.params import FILTERS, PENALTIES, SamplingParams
from swiftspec.runtime.executors import ExecutorRequest, ExpansionShape, TreeExecutor, select_executor
from swiftspec.runtime.runner import Runner
from swiftspec.tree.children import ChildSelector
from swiftspec.tree.tree import DraftTree


class TreeConfig(Protocol):
    """The shape of the draft tree, as `EngineConfig` defines it."""

    @property
    def max_nodes(self) -> int: ...  # largest bs
    @property
    def leaves_per_expansion(self) -> int: ...  # w
    @property
    def children_per_leaf(self) -> int: ...  # k
    @property
    def initial_draft_steps(self) -> int: ...  # d
    @property
    def proposal(self) -> str | None: ...
    def calibration_for(self, greedy: bool) -> float:
        """Returns the calibration of the children's weights, see `EngineConfig.calibration_for`."""
        ...


class LocalDrafter:
    """Drafter on a model in this process, which expands the draft tree between the target's forwards (serial mode).

    The model's KV cache holds the verified tokens before the root, then the expanded nodes. `pending`: verified tokens
    before the root whose KV is missing, because the draft had not expanded them. Their KV is computed in the root's
    forward, or by a prefill if there are more than w of them.
    """

    source = NodeSource.DRAFT_MODEL  # of the nodes that it proposes
    lost_reason = None
    grows = False  # whether `grow` expands the tree

    def __init__(
        self,
        runner: Runner,
        executors: Sequence[TreeExecutor],
        tree: DraftTree,
        children: ChildSelector,
        config: TreeConfig,
    ) -> None:
        """`executors`: executors that can expand `tree`, the fastest first."""
        self.runner, self.tree, self.executors = runner, tree, executors
        self._children, self._config = children, config
        self.draft_steps = config.initial_draft_steps  # d, unless the request overrides it
        self.max_nodes = config.max_nodes  # nodes of a proposal, unless the request overrides them
        self.pending: list[int] = []
        self._root = 0  # node of the current root; `settle` re-roots the tree, so that it becomes node 0

    @property
    def busy(self) -> float:
        return self.runner.busy

    @property
    def expansions(self) -> int:
        """d, the number of expansions per round of this request."""
        return self._request_steps or self.draft_steps

    def required_features(self, start: RequestStart) -> Features:
        """Returns the features that an executor must support to run a request."""
        return self._draft_params(start).features | ({"proposal sample"} if self._children.sampled else set())

    def select_executor(self, start: RequestStart) -> TreeExecutor:
        """Returns the executor that runs a request."""
        return select_executor(self.executors, self.required_features(start), start.executor)

    def _draft_params(self, start: RequestStart) -> SamplingParams:
        """Returns the sampling parameters of the draft. Children that are ranked and not sampled need neither filters
        nor penalties: the verification applies both, and without them the draft runs on faster executors."""
        if self._children.sampled:
            return start.sampling
        return start.sampling.without(FILTERS + PENALTIES)

    def open(self, start: RequestStart) -> None:
        config, sampling = self._config, start.sampling
        self._nodes, self._request_steps = sampling.verify_batch or self.max_nodes, sampling.draft_steps
        self._request, self._round = start.request, 0
        self._root_at = len(start.tokens) - 1  # absolute position
        self.pending, self._root = [], 0
        sampler = self._sampler = self.runner.sampler(self._draft_params(start), start.prompt)
        sampler.observe(start.output)
        tau = config.calibration_for(sampling.greedy)
        self._children.open(sampler, self._root_at, tau)
        self._open_cache(start)
        coupled = config.proposal == "coupled" and not sampling.greedy
        count = min(config.children_per_leaf, self.runner.vocab)
        self.executor = self.select_executor(start)
        shape = ExpansionShape(
            leaves=config.leaves_per_expansion,
            children=count,
            coupled=coupled,
            tau=tau,
            rank_children=self._children.rank,
            sampled=self._children.draws,
        )
        self.executor.open(ExecutorRequest(sampler, expansion=shape))

    def _open_cache(self, start: RequestStart) -> None:
        """Prefills the prompt, and resets the tree to its last token."""
        self.runner.open(start.tokens, max_cached=start.num_cached_tokens)
        self.tree.reset(start.tokens[-1])

    def propose(self) -> Proposal:
        self.expand(self.expansions)
        return self._best_proposal()

    def grow(self) -> None:
        pass  # serial: the tree is expanded after the result

    def fast_reply(self) -> Any:
        """Returns a native object that answers the next result without Python, with the proposal that `observe` and
        `propose` would give. None if the request does not support that."""
        return None

    def observe(self, result: VerifyResult) -> None:
        self.settle()
        self._sampler.observe(result.tokens)
        self.runner.observe(result.tokens)
        self._reroot(result.tokens)
        self._root_at += len(result.tokens)
        self._round = result.round + 1

    def settle(self) -> None:
        """Re-roots tree and KV cache at the node that `observe` has recorded as the new root. It is a separate step, so
        that a proposal need not wait for it."""
        if self._root != 0:
            path, kept = self.tree.reroot(self._root)
            self.runner.cache.commit(path, kept)
            self._root = 0
            self._children.retain_slots(kept)

    def close(self) -> None:
        self.runner.close()

    def expand(self, count: int = 1) -> None:
        """Expands the tree `count` times, or fewer if the tree or the KV cache is full."""
        self.settle()
        if len(self.pending) > self._config.leaves_per_expansion:
            self.runner.prefill(self.pending)
            self.pending.clear()
        self.executor.expand(self.tree, self.pending, count)

    def _best_proposal(self, first: int = 0) -> Proposal:
        nodes, tokens, parents, weights = self.tree.best_subtree(self._nodes, self._root, first)
        carried = None
        if self._children.sampled and len(nodes) > 1:
            above = np.unique(np.array(parents[1:], np.int64))
            carried = self._children.draft_probs(self.tree.slot[np.array(nodes)[above]])
        return Proposal.from_draft_model(
            self._request,
            self._round,
            self._root_at,
            tokens,
            parents,
            weights,
            draft_probs=carried,
            source=self.source,
        )

    def _reroot(self, tokens: Sequence[int]) -> None:
        """Records the node of the last verified token as the new root. Resets the tree instead if it does not contain
        all of the `tokens`, or if the child selector requires a reset."""
        path = [0, *self.tree.match_prefix(tokens)]
        if len(path) > len(tokens) and self._children.reroot():  # all tokens are nodes of the tree
            self._root = path[-1]
            return
        # Start a new tree. Of the tokens before its root, those of expanded nodes have KV; the others become pending.
        spelled = [int(self.tree.token[0]), *tokens[:-1]]
        slots = [slot for slot in self.tree.slot[path[: len(tokens)]].tolist() if slot < self.tree.slots]
        self.runner.cache.commit(slots)
        self.pending += spelled[len(slots) :]
        self.tree.reset(tokens[-1])
        self._children.retain_slots([])
