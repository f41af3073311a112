"""Tree replica: a copy of the draft's tree next to the decoding loop, without keys and values. It proposes without a
round trip to a remote draft.

The draft sends the nodes that its expansions add, in order (`TreeDelta`). The replica applies these and the verified
tokens in the same order as the draft, so it equals the draft's tree at the last result that the draft had processed
when it sent the delta. Verified tokens that the draft has not processed yet are followed down from that root, and the
proposal begins at the node they lead to. A late delta therefore still counts where its nodes survive; the other nodes
are removed by the next re-root.
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
    """Nodes that expansions have added to the draft tree of a request: n nodes in the order of creation, with
    consecutive ids from `first` on. None instead of a delta means that the tree is full, or must not grow before the
    next result.

    Ids count from 0, the root of the request, and are stable across re-roots; when the tree is reset, its root takes
    the next id. `round`: the round whose root they grew under, that is one more than the round of the last processed
    result.
    """

    request: int
    round: int
    expansions: int  # number of requested expansions
    first: int
    parents: Ints  # [n] ids
    tokens: Ints  # [n]
    weights: Floats  # [n] log-probabilities, cumulative from the root of that round

    def __len__(self) -> int:
        return len(self.tokens)


def merge_deltas(deltas: Sequence[TreeDelta]) -> TreeDelta:
    """Merges consecutive deltas of a round into one. Raises ValueError if their ids are not consecutive."""
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
    """Ids of the nodes of a tree, numbered identically by the draft and its replicas."""

    def open(self) -> None:
        """Resets the ids to a tree with only a root."""
        self.next = 0
        self._start_over()

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, count: int) -> None:
        """Assigns ids to `count` new nodes."""
        self.ids = np.concatenate((self.ids, np.arange(self.next, self.next + count)))
        self.next += count

    def follow(self, tree: DraftTree, tokens: Sequence[int]) -> int | None:
        """Must be called before the tree is re-rooted along verified tokens. Returns the node that they lead to, or
        None if the tree does not contain all of them and has to be reset."""
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
    """Replica of a draft tree. `tree` has the capacity of the draft's tree; slots and masks serve only to re-root."""

    def __init__(self, tree: DraftTree, vocab: int) -> None:
        self.tree, self._vocab, self._ids = tree, vocab, NodeIds()

    def open(self, token: int) -> None:
        """Begins a request with its root token."""
        self.tree.reset(token)
        self._ids.open()
        self._token, self._root = token, 0  # _root: first node of proposals; None: not in the tree
        self._round = 0  # the round whose root is node 0
        self._ahead: deque[tuple[int, tuple[int, ...]]] = deque()  # later rounds, with the tokens up to their roots

    def follow(self, tokens: Sequence[int], round_: int) -> None:
        """Moves the root of the proposals to the end of these verified tokens, the root of round `round_`. If the
        tree does not contain them, proposals consist of the root alone until the draft has processed them and grown
        there."""
        self._ahead.append((round_, tuple(tokens)))
        self._token = tokens[-1]
        self._find_root()

    def apply(self, delta: TreeDelta) -> None:
        """Applies the next delta. Raises ValueError if it cannot come from the draft of this tree; the tree is then
        unchanged except for its root."""
        if self._take_results(delta.round):
            self._find_root()
        parents = self._check_parents(delta)
        if len(delta) > 0:
            self._add_nodes(parents, delta)
            if self._root is None:
                self._find_root()

    def best(self, bs: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of a proposal of at most bs nodes, see `DraftTree.best_subtree`."""
        if self._root is None:
            return [self._token], [-1]
        _, tokens, parents = self.tree.best_subtree(bs, self._root)
        return tokens, parents

    def expected_mass(self, bs: int, w: int) -> tuple[float, float]:
        """Expected mass below the root, see `DraftTree.expected_mass`."""
        return (1.0, 1.0) if self._root is None else self.tree.expected_mass(bs, w, self._root)

    def _find_root(self) -> None:
        tokens = [token for _, path in self._ahead for token in path]
        path = self.tree.match_prefix(tokens)
        node = path[-1] if path else 0
        whole = len(path) == len(tokens) and self.tree.logprob[node] > NEG_INF  # the draft resets at a dead node
        self._root = node if whole else None

    def _take_results(self, round_: int) -> bool:
        """Re-roots along the results that the draft had processed before that round. Returns whether there were any."""
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
        """Returns the node indices of the delta's parents [n]; new nodes are numbered after those of the tree. Raises
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
        if not (delta.weights <= above).all():  # also rejects NaN
            raise ValueError("growth by a node that outweighs its parent")
        if len(np.unique(places * self._vocab + delta.tokens)) < n:
            raise ValueError("growth by the same token twice under one node")
        return places

    def _add_nodes(self, parents: Ints, delta: TreeDelta) -> None:
        """Expands the parents into the nodes of a delta."""
        tree, new = self.tree, slice(self.tree.count, self.tree.count + len(delta))
        expanded: NDArray[np.int64] = np.unique(parents)
        first, after = tree.expanded, tree.expanded + len(expanded)
        if after > tree.slots or (tree.slot[expanded] < tree.slots).any():
            raise ValueError("growth under nodes that were expanded before, or beyond the tree's room")
        tree.token[new], tree.parent[new], tree.logprob[new] = delta.tokens, parents, delta.weights
        while len(expanded) > 0:  # one generation per iteration, ancestors first
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
