"""Executors of expansions with a draft head, whose rows need hidden states besides their tokens."""

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


class StateExecutor(EagerExecutor):
    """Eager executor on a draft head, whose rows of verified tokens receive the target's hidden states.

    `offset`: the row at position p of the head's cache belongs to the target's hidden state at position p + offset.
    """

    def __init__(self, runner: Runner, states: TargetStates) -> None:
        super().__init__(runner)
        self._states, self.offset = states, 0
        runner.input_hidden = self._verified_states

    def _verified_states(self, batch: HostBatch) -> Tensor:
        """Returns the inputs of a chain of verified tokens."""
        first = int(batch.positions[0]) + self.offset
        return self._states.rows(first, first + len(batch))


class HeadExecutor(StateExecutor):
    """Eager executor of expansions with a draft head.

    Rows of verified tokens, the root included, receive the target's hidden state before them, so that the token of a
    row is the one after its state. Rows of drafted tokens receive the head's output for their parent.
    """

    def __init__(self, runner: Runner, states: TargetStates) -> None:
        super().__init__(runner, states)
        model = runner.model
        # output of the head for each tree slot
        self._outputs = torch.zeros(runner.tree_slots, model.spec.hidden_size, dtype=model.dtype, device=model.device)

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

    def _parent_slots(self, rows: int) -> Tensor:
        """Returns the tree slots of the parents of the leaves to which the latest `rows` slots were assigned."""
        tree = self._tree
        slots, used = tree.slot[: tree.count], tree.expanded
        leaves = np.flatnonzero((slots >= used - rows) & (slots < used))
        return torch.from_numpy(slots[tree.parent[leaves]])
