"""Executor of expansions with a draft head, whose rows need hidden states besides their tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from swiftspec.model.batch import HostBatch, Ints
from swiftspec.runtime.executors.eager import EagerExecutor
from swiftspec.runtime.runner import Runner
from swiftspec.runtime.target_states import TargetStates
from swiftspec.tree.tree import DraftTree


class HeadExecutor(EagerExecutor):
    """Eager executor of expansions with a draft head.

    Rows of verified tokens, the root included, receive the target's hidden state before them, and rows of drafted
    tokens the head's output for their parent.

    `offset`: the row at position p of the head's cache belongs to the target's hidden state at position p + offset, and
    its token is the next one.
    """

    def __init__(self, runner: Runner, states: TargetStates) -> None:
        super().__init__(runner)
        self._states, self.offset = states, 0
        model = runner.model
        # output of the head for each tree slot
        self._outputs = torch.zeros(runner.tree_slots, model.spec.hidden_size, dtype=model.dtype, device=model.device)
        runner.input_hidden = self._verified_states

    def expand(self, tree: DraftTree, pending: list[int], count: int) -> None:
        self._tree = tree
        super().expand(tree, pending, count)

    def positions(self, depths: Ints) -> Ints:
        return super().positions(depths) + self.offset + 1

    def forward(self, batch: HostBatch) -> Tensor:
        if batch.chain is None:
            batch = replace(batch, hidden=self._outputs[self._parent_slots(len(batch))])
        logits = self.runner.logits(batch)
        states, used = self.runner.hidden, self._tree.expanded
        assert states is not None
        rows = len(batch) if batch.chain is None else 1  # of a chain the last row is the root, the only one in the tree
        self._outputs[used - rows : used] = states[-rows:, 0]
        return logits

    def _verified_states(self, batch: HostBatch) -> Tensor:
        """Returns the inputs of a chain of verified tokens."""
        first = int(batch.positions[0]) + self.offset
        return self._states.rows(first, first + len(batch))

    def _parent_slots(self, rows: int) -> Tensor:
        """Returns the tree slots of the parents of the leaves to which the latest `rows` slots were assigned."""
        tree = self._tree
        slots, used = tree.slot[: tree.count], tree.expanded
        leaves = np.flatnonzero((slots >= used - rows) & (slots < used))
        return torch.from_numpy(slots[tree.parent[leaves]])
