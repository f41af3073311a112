"""Executor of the block forward of a block head, whose distributions become a draft tree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.model.batch import HostBatch, Ints
from swiftspec.model.spec import BlockSpec
from swiftspec.runtime.executors.head import StateExecutor
from swiftspec.runtime.runner import Runner
from swiftspec.runtime.target_states import TargetStates
from swiftspec.tree.marginals import add_likely_paths
from swiftspec.tree.tree import DraftTree, Leaves


class BlockExecutor(StateExecutor):
    """Executor of expansions with a block head. One forward gives a distribution at each position after the root, and
    the tree receives the paths with the largest products of their probabilities."""

    def __init__(self, runner: Runner, block: BlockSpec, states: TargetStates) -> None:
        super().__init__(runner, states)
        self._block = block

    def expand(self, tree: DraftTree, pending: list[int], count: int) -> None:
        """Drafts `count` positions, or all of the block if it has fewer, unless the tree was expanded before: it has a
        block already. The tree is filled up to its capacity in nodes."""
        depth = min(count, self._block.size - 1, len(tree.token) - 1)
        if tree.expanded > 0 or depth == 0:
            return
        if pending:
            self.runner.prefill(pending)
            pending.clear()
        root = tree.best_leaves(1)
        with self.runner.translate_peer_errors():  # in a group the ranks also exchange data after the forward
            logits = self.forward(self._block_batch(int(root.tokens[0]), depth))
            tokens, weights = self._rank(logits, root)
        add_likely_paths(tree, tokens, weights)

    def positions(self, depths: Ints) -> Ints:
        return super().positions(depths) + self.offset

    def _block_batch(self, root: int, depth: int) -> HostBatch:
        """Allocates tree slots for a block and returns its batch. Each row attends to all of them. `depth`: number of
        positions with logits."""
        size = self._block.size
        tokens = np.full(size, self._block.mask_token, np.int64)
        tokens[0] = root
        batch = self.runner.tree_batch(tokens, np.arange(size), np.ones((size, size), np.bool_))
        return replace(batch, num_logits=depth)

    def _rank(self, logits: Tensor, root: Leaves) -> tuple[Ints, NDArray[np.floating]]:
        """Returns the best tokens [positions, k] of each drafted position, with their log-weights [positions, k].

        A token constraint depends on the earlier tokens. It is applied to the most likely path, which ends where the
        constraint allows no further token.
        """
        shape = self._request.expansion
        assert shape is not None
        positions = torch.from_numpy(self.positions(np.arange(len(logits)))).to(logits.device)
        if not self._request.sampler.needs_paths:
            return shape.rank_children(logits, root, None, positions)
        path, found = list[int](), list[tuple[Ints, NDArray[np.floating]]]()
        for row in range(len(logits)):
            part = slice(row, row + 1)
            best = shape.rank_children(logits[part], root, [path], positions[part])
            if not best[1][0, 0] > -np.inf:
                break
            found.append(best)
            path = [*path, int(best[0][0, 0])]
        if not found:
            return np.empty((0, 0), np.int64), np.empty((0, 0))
        return np.concatenate([tokens for tokens, _ in found]), np.concatenate([weights for _, weights in found])
