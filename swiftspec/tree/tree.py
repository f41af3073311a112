"""The draft tree: maximum-likelihood expansion, the best connected sub-tree, re-rooting (paper section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swiftspec.tree.mask import MaskRows

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
NEG_INF = float("-inf")


@dataclass(frozen=True, slots=True)
class Leaves:
    """The rows of one expansion. `nodes`, `tokens`, `depths` are [r]; `mask` is [r, tree slots in use after it]."""

    nodes: Ints
    tokens: Ints
    depths: Ints
    mask: MaskRows


class DraftTree:
    """A struct of arrays over nodes in order of creation, so a parent's index is below its children's.

    `logprob` sums the draft's log-probabilities from the root (0 there), so a child never outweighs its parent and the
    best nodes always form a connected sub-tree. A node is expanded when it has a tree slot (KV and children); the
    others are leaves. Node 0 is the root; once expanded it has tree slot 0. Dead nodes (weight -inf: a filter forbids
    them) are never expanded or proposed. `visible[s]` is the mask row of tree slot s; the last row, all false, stands
    for "no parent". The arrays live on the host, where a tree of a few hundred nodes costs less than one tensor call.
    """

    def __init__(self, nodes: int, slots: int) -> None:
        self.state = np.zeros(2 + 4 * nodes, dtype=np.int64)  # one array, so that it is copied at once
        self.token, self.parent, self.slot, logprob = self.state[2:].reshape(4, nodes)  # slot: `slots` for none
        self.logprob = logprob.view(np.float64)
        self.visible = np.zeros((slots + 1, slots), dtype=np.bool_)
        self.sizes = self.state[:2]  # nodes, tree slots in use
        self.slots = slots
        self.reset(0)

    @property
    def count(self) -> int:
        """Nodes."""
        return int(self.sizes[0])

    @property
    def expanded(self) -> int:
        """Tree slots in use."""
        return int(self.sizes[1])

    def reset(self, token: int) -> None:
        """Starts over from an unexpanded root."""
        self.sizes[:] = 1, 0
        self.token[0], self.parent[0], self.logprob[0] = token, 0, 0.0
        self.slot.fill(self.slots)

    def expandable_leaves(self, children: int) -> int:
        """How many more leaves can be expanded into `children` each."""
        return min(self.slots - self.expanded, (self.token.shape[0] - self.count) // children)

    def best_leaves(self, w: int) -> Leaves:
        """Takes the w likeliest leaves (fewer when there are fewer) in their order, of equal weights the earlier first;
        hands each the next tree slot and its mask row."""
        unexpanded = self.slot[: self.count] == self.slots
        weights = np.where(unexpanded, self.logprob[: self.count], NEG_INF)
        nodes = np.argsort(-weights, kind="stable")[:w]  # drawn.py counts on that order of equal ones
        nodes = np.sort(nodes[weights[nodes] > NEG_INF])
        first, after = self.expanded, self.expanded + nodes.shape[0]
        assert after <= self.slots
        own = np.arange(first, after)
        mask = self.visible[self.slot[self.parent[nodes]]]
        mask[own - first, own] = True
        self.visible[first:after] = mask
        self.slot[nodes] = own
        self.sizes[1] = after
        return Leaves(nodes, self.token[nodes], mask.sum(-1) - 1, mask[:, :after])

    def add_children(self, nodes: Ints, tokens: Ints, logprobs: NDArray[np.floating]) -> None:
        """Hangs `tokens` [r, k] with their `logprobs` [r, k] (never above 0) under the expanded `nodes` [r]."""
        rows, k = tokens.shape
        new = slice(self.count, self.count + rows * k)
        self.token[new] = tokens.ravel()
        self.parent[new] = nodes.repeat(k)
        self.logprob[new] = (self.logprob[nodes, None] + logprobs).ravel()
        self.sizes[0] += rows * k

    def best_subtree(self, bs: int, root: int = 0, first: int = 0) -> tuple[list[int], list[int], list[int]]:
        """The bs likeliest nodes from `root` down: (nodes, tokens, parents), the likeliest first, parents by position.
        The `first` oldest nodes come before all others.

        Connected and in topological order because of equal weights the earlier node, hence the parent, comes first; so
        any number of leading nodes is the best sub-tree of that size.
        """
        weights = self.logprob[: self.count]
        if root != 0:
            weights = np.where(self.descendants(root), weights, NEG_INF)
        if first > 0:
            weights = np.where((np.arange(self.count) < first) & (weights > NEG_INF), 1.0, weights)
        near = np.flatnonzero(weights > NEG_INF)
        if len(near) > bs:  # sorting thousands would take milliseconds
            near = near[weights[near] >= np.partition(weights[near], -bs)[-bs]]
        nodes = near[np.argsort(-weights[near], kind="stable")[:bs]]
        place = {node: i for i, node in enumerate(nodes.tolist())}
        parents = [place[p] for p in self.parent[nodes[1:]].tolist()]
        return list(place), self.token[nodes].tolist(), [-1, *parents]

    def expected_mass(self, bs: int, w: int, root: int = 0) -> tuple[float, float]:
        """What weights promise from `root` down: the probabilities of the bs likeliest nodes, summed (with the root's 1
        the tokens that a round can expect), and those of the w likeliest leaves."""
        weights = np.exp(self.logprob[: self.count] - self.logprob[root])
        if root != 0:
            weights = np.where(self.descendants(root), weights, 0.0)
        leaves = weights[self.slot[: self.count] == self.slots]
        return float(np.sort(weights)[::-1][:bs].sum()), float(np.sort(leaves)[::-1][:w].sum())

    def match_prefix(self, tokens: Sequence[int]) -> list[int]:
        """The nodes that spell as many leading `tokens` as the tree holds, going down from the root (not included)."""
        path = [0]
        for token in tokens:
            child = (self.parent[1 : self.count] == path[-1]) & (self.token[1 : self.count] == token)
            if not child.any():
                break
            path.append(int(child.argmax()) + 1)
        return path[1:]

    def reroot(self, node: int) -> tuple[list[int], list[int]]:
        """Makes `node` the root and keeps its sub-tree, renumbered in order.

        Returns the old tree slots of the path from the old root to the node's parent, and those of the surviving nodes:
        what `KVCache.commit` takes.
        """
        if node == 0:
            return [], list(range(self.expanded))
        above = np.flatnonzero(self.visible[self.slot[self.parent[node]]]).tolist()
        slot = int(self.slot[node])
        if slot == self.slots:  # a leaf: nothing below it
            self.reset(int(self.token[node]))
            return above, []
        inside = self.descendants(node)
        kept = np.flatnonzero(self.visible[: self.expanded, slot])
        self._compact(np.flatnonzero(inside), kept)
        return above, kept.tolist()

    def descendants(self, node: int) -> NDArray[np.bool_]:
        """[count], which nodes lie below `node`, itself among them."""
        slot = int(self.slot[node])
        if slot == self.slots:
            inside = np.zeros(self.count, dtype=np.bool_)
        else:
            inside = self.visible[self.slot[self.parent[: self.count]], slot]
        inside[node] = True
        return inside

    def _compact(self, nodes: Ints, slots: Ints) -> None:
        """Drops all but these nodes and tree slots, both ascending, and renumbers; the first node becomes the root."""
        new_node = np.zeros(self.count, dtype=np.int64)
        new_node[nodes] = np.arange(nodes.shape[0])
        new_slot = np.full(self.slots + 1, self.slots)
        new_slot[slots] = np.arange(slots.shape[0])
        slot, parent, weight = new_slot[self.slot[nodes]], new_node[self.parent[nodes]], self.logprob[nodes]
        self.sizes[:] = nodes.shape[0], slots.shape[0]
        self.slot.fill(self.slots)
        self.slot[: self.count] = slot
        self.token[: self.count] = self.token[nodes]
        self.parent[: self.count] = parent  # the root's was not kept, so it is 0: the root itself
        self.logprob[: self.count] = weight - weight[0]
        rows = self.visible[np.ix_(slots, slots)]
        self.visible.fill(False)
        self.visible[: self.expanded, : self.expanded] = rows

    def path_tokens(self, nodes: Sequence[int] | Ints) -> list[list[int]]:
        """Tokens from below the root down to each node, for what follows the path."""
        spelled = lambda node: [*spelled(int(self.parent[node])), int(self.token[node])] if node else []  # noqa: E731
        return [spelled(int(node)) for node in nodes]
