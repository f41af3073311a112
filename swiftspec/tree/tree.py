"""Draft tree: maximum-likelihood expansion, best connected sub-tree, re-rooting (paper section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftspec.tree.mask import MaskRows

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
NEG_INF = float("-inf")
# Estimated tokens that an expansion adds to a round, divided by the summed probability of the expanded leaves
# (docs/decisions/asynchronous-drafting.md).
EXPANSION_YIELD = 0.3

# A connected sub-tree with its root first: nodes, tokens, parents (indices into `nodes`, -1 for the root) and
# log-weights relative to the root, as float32 numbers (see `Proposal.weights`).
SubTree = tuple[list[int], list[int], list[int], list[float]]


def expansion_pays(tokens: float, leaves: float, d: int) -> bool:
    """Returns whether one more expansion after a result pays: `EXPANSION_YIELD * leaves > tokens / d`.

    The expansion takes 1/d of a round's time, so it must add more than 1/d of the round's expected tokens. `tokens`,
    `leaves`: expected tokens of the round and probability of the best leaves, as returned by
    `DraftTree.expected_mass`. `d`: expansions per round.
    """
    return EXPANSION_YIELD * leaves > tokens / d


@dataclass(frozen=True, slots=True)
class Leaves:
    """The leaves of one expansion, one row each: `nodes`, `tokens` and `depths` (0 at the root) are [leaves], `mask` is
    [leaves, tree slots in use after the expansion]."""

    nodes: Ints
    tokens: Ints
    depths: Ints
    mask: MaskRows


class DraftTree:
    """Draft tree: arrays over its nodes in the order of creation, so a parent's index is below those of its children.

    `logprob` is the cumulative draft log-probability from the root (0 there), so a child is never more likely than its
    parent, and the most likely nodes always form a connected sub-tree. An expanded node has a tree slot (KV and
    children); the other nodes are leaves. Node 0 is the root; once expanded it has tree slot 0. Dead nodes (`logprob`
    -inf: tokens that a filter or a token constraint excludes) are never expanded or proposed. `visible[s]` is the mask
    row of tree slot s; the last row, all False, is used for the root, which has no parent. The arrays are in host
    memory, where an operation on a few hundred nodes costs less than one tensor call.

    `nodes`, `slots`: capacity of the tree in nodes and in tree slots.
    """

    def __init__(self, nodes: int, slots: int) -> None:
        self.state = np.zeros(2 + 4 * nodes, dtype=np.int64)  # one array, so that a single copy transfers it
        self.token, self.parent, self.slot, logprob = self.state[2:].reshape(4, nodes)  # slot of a leaf: `slots`
        self.logprob = logprob.view(np.float64)
        self.visible = np.zeros((slots + 1, slots), dtype=np.bool_)
        self.sizes = self.state[:2]  # number of nodes, number of tree slots in use
        self.slots = slots
        self.reset(0)

    @property
    def count(self) -> int:
        """Number of nodes."""
        return int(self.sizes[0])

    @property
    def expanded(self) -> int:
        """Number of tree slots in use."""
        return int(self.sizes[1])

    def reset(self, token: int) -> None:
        """Resets the tree to an unexpanded root."""
        self.sizes[:] = 1, 0
        self.token[0], self.parent[0], self.logprob[0] = token, 0, 0.0
        self.slot.fill(self.slots)

    def expandable_leaves(self, children: int) -> int:
        """Returns the number of leaves that can still be expanded into `children` children each, given the capacity."""
        return min(self.slots - self.expanded, (self.token.shape[0] - self.count) // children)

    def best_leaves(self, w: int) -> Leaves:
        """Selects the `w` most likely leaves, or all if there are fewer, and assigns the next tree slots and their mask
        rows to them. Returns them in node order. Of equally likely leaves the older one is selected."""
        unexpanded = self.slot[: self.count] == self.slots
        weights = np.where(unexpanded, self.logprob[: self.count], NEG_INF)
        nodes = np.argsort(-weights, kind="stable")[:w]  # sampled_children.py relies on this order of ties
        nodes = np.sort(nodes[weights[nodes] > NEG_INF])
        mask = self.assign_slots(nodes)
        return Leaves(nodes, self.token[nodes], mask.sum(-1) - 1, mask[:, : self.expanded])

    def assign_slots(self, nodes: Ints) -> MaskRows:
        """Assigns the next tree slots to leaves whose parents have slots, and returns their mask rows [nodes, tree
        slots]."""
        first, after = self.expanded, self.expanded + nodes.shape[0]
        assert after <= self.slots
        own = np.arange(first, after)
        mask = self.visible[self.slot[self.parent[nodes]]]
        mask[own - first, own] = True
        self.visible[first:after] = mask
        self.slot[nodes] = own
        self.sizes[1] = after
        return mask

    def add_children(self, nodes: Ints, tokens: Ints, logprobs: NDArray[np.floating]) -> None:
        """Adds k children to each of the expanded `nodes` [leaves]: `tokens` [leaves, k] with the log-probabilities
        `logprobs` [leaves, k], at most 0, given the parent."""
        rows, k = tokens.shape
        new = slice(self.count, self.count + rows * k)
        self.token[new] = tokens.ravel()
        self.parent[new] = nodes.repeat(k)
        self.logprob[new] = (self.logprob[nodes, None] + logprobs).ravel()
        self.sizes[0] += rows * k

    def best_subtree(self, bs: int, root: int = 0, first: int = 0) -> SubTree:
        """Returns the `bs` most likely nodes of the sub-tree of node `root`, the most likely first, or all nodes if
        there are fewer.

        The result is connected and in topological order, because the older of equally likely nodes comes first, hence
        the parent. Any prefix of it is therefore the best sub-tree of that size. `first`: number of oldest nodes of the
        tree that precede all others, in the order of creation.
        """
        weights = self.logprob[: self.count]
        if root != 0:
            weights = np.where(self.descendants(root), weights, NEG_INF)
        if first > 0:
            weights = np.where((np.arange(self.count) < first) & (weights > NEG_INF), 1.0, weights)
        near = np.flatnonzero(weights > NEG_INF)
        if len(near) > bs:  # sorting thousands of nodes takes milliseconds
            near = near[weights[near] >= np.partition(weights[near], -bs)[-bs]]
        nodes = near[np.argsort(-weights[near], kind="stable")[:bs]]
        place = {node: i for i, node in enumerate(nodes.tolist())}
        parents = [place[p] for p in self.parent[nodes[1:]].tolist()]
        relative = (self.logprob[nodes] - self.logprob[root]).astype(np.float32)
        return list(place), self.token[nodes].tolist(), [-1, *parents], relative.tolist()

    def expected_mass(self, bs: int, w: int, root: int = 0) -> tuple[float, float]:
        """Returns two sums of node probabilities in the sub-tree of node `root`, relative to `root`: over its `bs` most
        likely nodes, which is the expected number of tokens per round, and over its `w` most likely leaves."""
        weights = np.exp(self.logprob[: self.count] - self.logprob[root])
        if root != 0:
            weights = np.where(self.descendants(root), weights, 0.0)
        leaves = weights[self.slot[: self.count] == self.slots]
        return float(np.sort(weights)[::-1][:bs].sum()), float(np.sort(leaves)[::-1][:w].sum())

    def fast_reply(self, request: int, root_at: int, bs: int, w: int, steps: int, worth: float) -> Any:
        """Returns a native object that answers the next result without Python, or None: this tree has none.

        `request`: number of the request. `root_at`: position of the root. `steps`: d. `worth`: EXPANSION_YIELD, or 0
        to ignore whether another expansion pays.
        """
        return None

    def match_prefix(self, tokens: Sequence[int]) -> list[int]:
        """Returns the nodes along the longest prefix of `tokens` that the tree contains, from the root's child down."""
        path = [0]
        for token in tokens:
            child = (self.parent[1 : self.count] == path[-1]) & (self.token[1 : self.count] == token)
            if not child.any():
                break
            path.append(int(child.argmax()) + 1)
        return path[1:]

    def reroot(self, node: int) -> tuple[list[int], list[int]]:
        """Re-roots the tree at `node`: keeps only its sub-tree, whose nodes and slots are renumbered in order.

        Returns the arguments of `ModelCache.commit`, as tree slots before the re-root: those of the path from the old
        root to the parent of `node`, and those of the surviving expanded nodes.
        """
        if node == 0:
            return [], list(range(self.expanded))
        above = np.flatnonzero(self.visible[self.slot[self.parent[node]]]).tolist()
        slot = int(self.slot[node])
        if slot == self.slots:  # a leaf has no descendants
            self.reset(int(self.token[node]))
            return above, []
        inside = self.descendants(node)
        kept = np.flatnonzero(self.visible[: self.expanded, slot])
        self._compact(np.flatnonzero(inside), kept)
        return above, kept.tolist()

    def descendants(self, node: int) -> NDArray[np.bool_]:
        """Returns a bool array [nodes in use] that is True in the sub-tree of `node`, itself included."""
        slot = int(self.slot[node])
        if slot == self.slots:
            inside = np.zeros(self.count, dtype=np.bool_)
        else:
            inside = self.visible[self.slot[self.parent[: self.count]], slot]
        inside[node] = True
        return inside

    def _compact(self, nodes: Ints, slots: Ints) -> None:
        """Keeps only `nodes` and tree `slots`, both ascending, and renumbers them; the first node is the new root."""
        new_node = np.zeros(self.count, dtype=np.int64)
        new_node[nodes] = np.arange(nodes.shape[0])
        new_slot = np.full(self.slots + 1, self.slots)
        new_slot[slots] = np.arange(slots.shape[0])
        slot, parent, weight = new_slot[self.slot[nodes]], new_node[self.parent[nodes]], self.logprob[nodes]
        self.sizes[:] = nodes.shape[0], slots.shape[0]
        self.slot.fill(self.slots)
        self.slot[: self.count] = slot
        self.token[: self.count] = self.token[nodes]
        self.parent[: self.count] = parent  # the root's parent is removed, so the entry is 0: the root itself
        self.logprob[: self.count] = weight - weight[0]
        rows = self.visible[np.ix_(slots, slots)]
        self.visible.fill(False)
        self.visible[: self.expanded, : self.expanded] = rows

    def path_tokens(self, nodes: Sequence[int] | Ints) -> list[list[int]]:
        """Returns for each node the tokens from the root's child down to the node; empty for the root."""
        spelled = lambda node: [*spelled(int(self.parent[node])), int(self.token[node])] if node else []  # noqa: E731
        return [spelled(int(node)) for node in nodes]
