"""A copy of the draft's tree where the loop runs, without keys and values: it proposes by itself, so that the target
need not wait for a draft that is far away.

The draft tells what its expansions add, in order (`TreeDelta`). The copy does with that and with the verified tokens
what the draft does, in the same order, so it is the draft's own tree, as of the last result that the draft had taken in
when it said so. Verified tokens that the draft has not taken in yet are walked down from that root, and the proposal
begins where they end. So growth from before a result still counts where its nodes survive, however late it comes; where
they do not, it goes with the next re-root.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from swiftspec.tree.tree import NEG_INF, DraftTree, Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class TreeDelta:
    """What expansions have added to a request's draft tree: n nodes in the order of creation, with the ids `first`,
    `first` + 1, and so on. None: the draft has no room, or is not to grow on before the next result.

    Ids count from 0, the root that the request was opened with, and outlive re-roots; a root that the draft starts over
    from takes the next one. `round`: whose root they grew under, that is one more than the last result's taken in.
    """

    request: int
    round: int
    expansions: int  # how many were asked for
    first: int
    parents: Ints  # [n] ids
    tokens: Ints  # [n]
    weights: Floats  # [n] log-probabilities, summed from that round's root

    def __len__(self) -> int:
        return len(self.tokens)


def merge_deltas(deltas: Sequence[TreeDelta]) -> TreeDelta:
    """Consecutive ones of a round as one. Raises ValueError where ids do not go on."""
    if len(deltas) == 1:
        return deltas[0]
    for before, after in pairwise(deltas):
        if after.first != before.first + len(before):
            raise ValueError(f"growth from node {after.first}, where node {before.first + len(before)} comes next")
    parts = ([getattr(delta, name) for delta in deltas] for name in ("parents", "tokens", "weights"))
    parents, tokens, weights = map(np.concatenate, parts)
    expansions = sum(delta.expansions for delta in deltas)
    return TreeDelta(deltas[0].request, deltas[0].round, expansions, deltas[0].first, parents, tokens, weights)


class NodeIds:
    """The ids of a tree's nodes, which the draft and its copies count alike."""

    def open(self) -> None:
        """Begins with a root alone."""
        self.next = 0
        self._start_over()

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, count: int) -> None:
        """The tree has so many more nodes."""
        self.ids = np.concatenate((self.ids, np.arange(self.next, self.next + count)))
        self.next += count

    def follow(self, tree: DraftTree, tokens: Sequence[int]) -> int | None:
        """To be called before the tree is re-rooted along verified tokens. Returns the node they lead to; None where
        the tree has to start over, since it does not hold them all."""
        path = tree.match_prefix(tokens)
        if len(path) < len(tokens):
            self._start_over()
            return None
        self.ids = self.ids[tree.descendants(path[-1])]
        return path[-1]

    def _start_over(self) -> None:
        self.ids = np.array([self.next])  # ascending, [nodes of the tree]
        self.next += 1


class TreeReplica:
    """The copy. `tree` has as much room as the draft's; what it keeps of slots and masks is there to re-root by."""

    def __init__(self, tree: DraftTree, vocab: int) -> None:
        self.tree, self._vocab, self._ids = tree, vocab, NodeIds()

    def open(self, token: int) -> None:
        """Begins a request at its root."""
        self.tree.reset(token)
        self._ids.open()
        self._token, self._root = token, 0  # _root: the node that proposals begin at; None: not here
        self._round = 0  # whose root node 0 is
        self._ahead: deque[tuple[int, tuple[int, ...]]] = deque()  # rounds after that, and the tokens up to their roots

    def follow(self, tokens: Sequence[int], round_: int) -> None:
        """Proposes from the end of these verified tokens on, the root of that round. Where they lead out of the tree
        this is the root alone, until the draft has taken them in and grown there."""
        self._ahead.append((round_, tuple(tokens)))
        self._token = tokens[-1]
        self._find_root()

    def apply(self, delta: TreeDelta) -> None:
        """Takes in the next delta. Raises ValueError, and is the same as before but for its root, where it cannot have
        come from the draft of this tree."""
        if self._take_results(delta.round):
            self._find_root()
        parents = self._check_parents(delta)
        if len(delta) > 0:
            self._add_nodes(parents, delta)
            if self._root is None:
                self._find_root()

    def best(self, bs: int) -> tuple[list[int], list[int]]:
        """The tokens and parents of a proposal of at most bs nodes, as `DraftTree.best_subtree` has them."""
        if self._root is None:
            return [self._token], [-1]
        _, tokens, parents = self.tree.best_subtree(bs, self._root)
        return tokens, parents

    def expected_mass(self, bs: int, w: int) -> tuple[float, float]:
        """What the weights below the root promise: see `DraftTree.prospects`."""
        return (1.0, 1.0) if self._root is None else self.tree.expected_mass(bs, w, self._root)

    def _find_root(self) -> None:
        tokens = [token for _, path in self._ahead for token in path]
        path = self.tree.match_prefix(tokens)
        node = path[-1] if path else 0
        whole = len(path) == len(tokens) and self.tree.logprob[node] > NEG_INF  # the draft starts over from a dead one
        self._root = node if whole else None

    def _take_results(self, round_: int) -> bool:
        """Re-roots as the draft has, which has taken in all results before that round. Whether there were any."""
        before = len(self._ahead)
        while self._ahead and self._ahead[0][0] <= round_:
            self._round, tokens = self._ahead.popleft()
            node = self._ids.follow(self.tree, tokens)
            if node is None:
                self.tree.reset(tokens[-1])
            else:
                self.tree.reroot(node)
        return len(self._ahead) < before

    def _check_parents(self, delta: TreeDelta) -> Ints:
        """The nodes that are the parents of a delta's, [n], which themselves come after those of the tree. Raises
        ValueError on a delta that does not fit."""
        tree, n, there = self.tree, len(delta), self.tree.count
        if delta.round != self._round:
            raise ValueError(f"growth of round {delta.round}, where the draft stands at round {self._round}")
        if delta.first != self._ids.next or delta.expansions < 1:
            raise ValueError(f"growth from node {delta.first}, where node {self._ids.next} comes next")
        if not len(delta.parents) == len(delta.weights) == n <= len(tree.token) - there:
            raise ValueError(f"growth of {n} nodes, of which a tree has room for {len(tree.token) - there}")
        ids = np.concatenate((self._ids.ids, np.arange(delta.first, delta.first + n)))
        places = np.searchsorted(ids, delta.parents)
        if not (places < np.arange(there, there + n)).all() or not (ids[places] == delta.parents).all():
            raise ValueError("growth under nodes that are not in the tree")
        if not ((delta.tokens >= 0) & (delta.tokens < self._vocab)).all():
            raise ValueError(f"growth by a token outside 0..{self._vocab - 1}")
        above = np.concatenate((tree.logprob[:there], delta.weights))[places]
        if not (delta.weights <= above).all():  # nor may it be NaN
            raise ValueError("growth by a node that outweighs its parent")
        if len(np.unique(places * self._vocab + delta.tokens)) < n:
            raise ValueError("growth by the same token twice under one node")
        return places

    def _add_nodes(self, parents: Ints, delta: TreeDelta) -> None:
        """Expands the parents into a delta's nodes."""
        tree, new = self.tree, slice(self.tree.count, self.tree.count + len(delta))
        expanded: NDArray[np.int64] = np.unique(parents)
        first, after = tree.expanded, tree.expanded + len(expanded)
        if after > tree.slots or (tree.slot[expanded] < tree.slots).any():
            raise ValueError("growth under nodes that were expanded before, or beyond the tree's room")
        tree.token[new], tree.parent[new], tree.logprob[new] = delta.tokens, parents, delta.weights
        while len(expanded) > 0:  # a generation at a time, ancestors first
            above = tree.slot[tree.parent[expanded]]
            here = (above < tree.slots) | (expanded == 0)
            nodes, expanded = expanded[here], expanded[~here]
            slots = np.arange(first, first + len(nodes))
            rows = tree.visible[above[here]]
            rows[slots - first, slots] = True
            tree.visible[slots], tree.slot[nodes] = rows, slots
            first += len(nodes)
        tree.sizes[:] = new.stop, after
        self._ids.add(len(delta))
