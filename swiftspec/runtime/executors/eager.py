"""Eager executor: launches each forward operator by operator; supports every request and device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from swiftspec.messages import Proposal
from swiftspec.model.batch import HostBatch, Ints
from swiftspec.runtime.executors import Accepted, ExecutorRequest
from swiftspec.runtime.runner import Runner
from swiftspec.tree import mask as tree_mask
from swiftspec.tree.tree import DraftTree


class EagerExecutor:
    """Eager executor of expansions and verifications. The host waits for the logits of each forward."""

    name = "eager"
    columns: Sequence[str] = ()

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def open(self, request: ExecutorRequest) -> None:
        self._request = request
        self._logits: Tensor | None = None  # of the proposal verified last

    def expand(self, tree: DraftTree, pending: list[int], count: int) -> None:
        for _ in range(count):
            if not self.has_room(tree, pending) or not self._expand_once(tree, pending):
                return

    def has_room(self, tree: DraftTree, pending: Sequence[int]) -> bool:
        """Returns whether tree and KV cache have space for another expansion."""
        shape = self._request.expansion
        assert shape is not None
        return min(tree.expandable_leaves(shape.children), self.runner.cache.free_slots - len(pending)) >= shape.leaves

    def _expand_once(self, tree: DraftTree, pending: list[int]) -> bool:
        """Expands the best leaves once. Returns False if the tree has no leaf that can be expanded."""
        shape = self._request.expansion
        assert shape is not None
        leaves = tree.best_leaves(shape.leaves)
        if len(leaves.nodes) == 0:
            return False
        with self.runner.translate_peer_errors():  # in a group the ranks also exchange data after the forward
            if tree.expanded == 1:  # the root, together with the pending tokens
                logits = self.forward(self.runner.chain_batch([*pending, int(leaves.tokens[0])]))[-1:]
                pending.clear()
            else:
                logits = self.forward(self.runner.tree_batch(leaves.tokens, leaves.depths, leaves.mask))
            paths = tree.path_tokens(leaves.nodes) if self._request.sampler.needs_paths else None
            positions = torch.from_numpy(self.positions(leaves.depths))
            children = shape.rank_children(logits, leaves, paths, positions)
        tree.add_children(leaves.nodes, *children)
        return True

    def positions(self, depths: Ints) -> Ints:
        """Returns the absolute positions of nodes at `depths`; 0 is the root."""
        return depths + self.runner.cache.prefix_len[0]

    def verify(self, proposal: Proposal) -> Accepted:
        batch, depths = self.proposal_batch(proposal)
        with self.runner.translate_peer_errors():
            return self.accept(proposal, depths, self.forward(batch))

    def proposal_batch(self, proposal: Proposal) -> tuple[HostBatch, Ints]:
        """Allocates tree slots for a proposal's nodes. Returns their batch and their depths [nodes]; 0 is the root."""
        mask = tree_mask.from_parents(proposal.parents)
        depths = mask.sum(-1) - 1
        return self.runner.tree_batch(np.array(proposal.tokens), depths, mask), depths

    def accept(self, proposal: Proposal, depths: Ints, logits: Tensor) -> Accepted:
        """Decides which nodes of a proposal are accepted. `depths` [nodes]: 0 is the root. `logits` [nodes, vocab]:
        raw."""
        request, self._logits = self._request, logits
        assert request.accept is not None
        paths = tree_mask.paths(proposal.tokens, proposal.parents) if request.sampler.needs_paths else None
        positions = torch.from_numpy(depths + proposal.prefix_len)
        return request.accept(proposal, logits, paths, positions)

    def probabilities(self, tokens: Sequence[int], parents: Sequence[int]) -> Sequence[float] | None:
        if self._logits is None or self.runner.shard is not None:
            return None
        logits, above = self._logits[:, : self.runner.vocab].float(), list(parents[1:])
        return (logits[above, list(tokens[1:])] - logits.logsumexp(-1)[above]).exp().tolist()

    def logits(self, nodes: Sequence[int]) -> Tensor:
        assert self._logits is not None
        return self._logits[list(nodes)]

    def hidden_states(self, nodes: Sequence[int]) -> Tensor | None:
        return None if self.runner.hidden is None else self.runner.hidden[list(nodes)]

    def settle(self, path: Sequence[int]) -> None:
        self.runner.cache.commit(path)

    def forward(self, batch: HostBatch) -> Tensor:
        """Runs a forward and returns its logits [rows, vocab]."""
        return self.runner.logits(batch)

    def finish(self) -> None:
        """Called after results that depend on the last forward were read."""
