"""Tree replica: a copy of the draft's tree, without keys and values, in the process of the decoding loop. It proposes
without a round trip to a remote draft.

The draft sends the nodes that its expansions add, in order (`TreeDelta`). The replica applies deltas and results in the
same order as the draft, so its tree equals the draft's tree at the time when the draft sent the last delta. Results
that the draft had not processed by then do not re-root the replica yet: their tokens are followed down from its root,
and a proposal begins at the node that they lead to. The nodes of a late delta are therefore used if they lie below that
node; the others are removed by the next re-root.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from swiftspec.tree.tree import NEG_INF, DraftTree, Floats, Ints

MIN_WEIGHT = float(np.finfo(np.float32).min)  # smallest finite log-weight of a node (`Proposal.weights`)


@dataclass(frozen=True, slots=True, eq=False)
class TreeDelta:
    """Nodes that expansions have added to the draft tree of a request, in the order of creation, with consecutive ids
    from `first` on. A delta without nodes means that the draft does not expand again before the next result, for
    example because its tree is full.

    An id numbers the nodes of a request from 0, its first root, and is stable across re-roots; when the tree is reset,
    the new root takes the next id. `round`: the round in which the draft expanded: 0 before it has processed a result,
    then one more than the round of the last processed result.
    """

    request: int
    round: int
    prefix_len: int  # verified tokens before the root of `round`
    expansions: int  # number of expansions requested since the previous delta; a full tree performs fewer
    first: int
    parents: Ints  # [nodes] ids
    tokens: Ints  # [nodes]
    weights: Floats  # [nodes] log-probabilities, cumulative from the root of `round`

    def __len__(self) -> int:
        return len(self.tokens)


def merge_deltas(deltas: Sequence[TreeDelta]) -> TreeDelta:
    """Merges consecutive deltas of a round into one. Raises ValueError if their ids are not consecutive."""
    if len(deltas) == 1:
        return deltas[0]
    for before, after in pairwise(deltas):
        if after.first != before.first + len(before):
            raise ValueError(f"delta starts at node {after.first}, expected node {before.first + len(before)}")
    parts = ([getattr(delta, name) for delta in deltas] for name in ("parents", "tokens", "weights"))
    parents, tokens, weights = map(np.concatenate, parts)
    expansions, place = sum(delta.expansions for delta in deltas), deltas[0]
    head = place.request, place.round, place.prefix_len, expansions, place.first
    return TreeDelta(*head, parents, tokens, weights)


class NodeIds:
    """Ids of the nodes of a draft tree (see `TreeDelta`), equal on the draft and its replicas. `ids[i]`: id of node i.
    `next`: id of the next node."""

    def open(self) -> None:
        """Starts a request: the tree consists of a root with id 0."""
        self.next = 0
        self._start_over()

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, count: int) -> None:
        """Assigns ids to `count` new nodes."""
        self.ids = np.concatenate((self.ids, np.arange(self.next, self.next + count)))
        self.next += count

    def follow(self, tree: DraftTree, tokens: Sequence[int]) -> int | None:
        """Updates the ids for a re-root along verified `tokens`, before `tree` itself is re-rooted. Returns the node
        of the last token, or None if the tree does not contain all tokens and has to be reset."""
        path = tree.match_prefix(tokens)
        if len(path) < len(tokens):
            self._start_over()
            return None
        self.ids = self.ids[tree.descendants(path[-1])]
        return path[-1]

    def _start_over(self) -> None:
        self.ids = np.array([self.next])  # [nodes of the tree], ascending
        self.next += 1


class TreeReplica:
    """Replica of a draft tree. `tree` must have the capacity of the draft's tree. Its slots and masks are used only to
    find descendants, since the replica has no KV."""

    def __init__(self, tree: DraftTree, vocab: int) -> None:
        self.tree, self._vocab, self._ids = tree, vocab, NodeIds()

    def open(self, token: int, prefix_len: int) -> None:
        """Starts a request. `token`: token of the root. `prefix_len`: verified tokens before it."""
        self.tree.reset(token)
        self._ids.open()
        # root of proposals: its token, and its node or None while the tree does not contain it
        self._token, self._root = token, 0
        self._round, self._prefix_len = 0, prefix_len  # the round whose root is node 0; verified tokens before it
        # results that no delta covers yet: the round that each one starts, and its verified tokens
        self._ahead: deque[tuple[int, tuple[int, ...]]] = deque()

    def follow(self, tokens: Sequence[int], round_: int) -> None:
        """Moves the root of proposals along the verified `tokens` of a result; the last one is the root of round
        `round_`. Proposals consist of this root alone while the tree does not contain it."""
        self._ahead.append((round_, tuple(tokens)))
        self._token = tokens[-1]
        self._find_root()

    def apply(self, delta: TreeDelta) -> None:
        """Re-roots the tree to the round of the next delta and adds its nodes. Raises ValueError if the delta does not
        fit the tree; none of its nodes is then added."""
        if self._take_results(delta.round):
            self._find_root()
        parents = self._check_parents(delta)
        if len(delta) > 0:
            self._add_nodes(parents, delta)
            if self._root is None:
                self._find_root()

    def best(self, bs: int) -> tuple[list[int], list[int], list[float]]:
        """Returns tokens, parents and log-weights of a proposal of at most `bs` nodes, see
        `DraftTree.best_subtree`."""
        if self._root is None:
            return [self._token], [-1], [0.0]
        return self.tree.best_subtree(bs, self._root)[1:]

    def expected_mass(self, bs: int, w: int) -> tuple[float, float]:
        """Returns `DraftTree.expected_mass` for the root of proposals; (1, 1) while the tree does not contain it."""
        return (1.0, 1.0) if self._root is None else self.tree.expected_mass(bs, w, self._root)

    def _find_root(self) -> None:
        tokens = [token for _, path in self._ahead for token in path]
        path = self.tree.match_prefix(tokens)
        node = path[-1] if path else 0
        whole = len(path) == len(tokens) and self.tree.logprob[node] > NEG_INF  # the draft resets at a dead node
        self._root = node if whole else None

    def _take_results(self, round_: int) -> bool:
        """Re-roots the tree along the results that the draft had processed by round `round_`. Returns whether there
        were any."""
        before = len(self._ahead)
        while self._ahead and self._ahead[0][0] <= round_:
            self._round, tokens = self._ahead.popleft()
            self._prefix_len += len(tokens)
            node = self._ids.follow(self.tree, tokens)
            if node is None:
                self.tree.reset(tokens[-1])
            else:
                self.tree.reroot(node)
        return len(self._ahead) < before

    def _check_parents(self, delta: TreeDelta) -> Ints:
        """Validates a delta and returns the node index of each new node's parent; the new nodes themselves count from
        `tree.count` on. Raises ValueError if the delta does not fit the tree."""
        tree, n, there = self.tree, len(delta), self.tree.count
        if delta.round != self._round:
            raise ValueError(f"delta of round {delta.round}, expected round {self._round}")
        if delta.prefix_len != self._prefix_len:
            raise ValueError(f"delta after {delta.prefix_len} verified tokens, expected {self._prefix_len}")
        if delta.first != self._ids.next or delta.expansions < 1:
            raise ValueError(f"delta starts at node {delta.first}, expected node {self._ids.next}")
        if not len(delta.parents) == len(delta.weights) == n:
            raise ValueError(f"delta of {n} tokens has {len(delta.parents)} parents and {len(delta.weights)} weights")
        if n > len(tree.token) - there:
            raise ValueError(f"delta of {n} nodes does not fit {len(tree.token) - there} free nodes")
        ids = np.concatenate((self._ids.ids, np.arange(delta.first, delta.first + n)))
        places = np.searchsorted(ids, delta.parents)
        if not (places < np.arange(there, there + n)).all() or not (ids[places] == delta.parents).all():
            raise ValueError("a parent in the delta is not in the tree")
        if not ((delta.tokens >= 0) & (delta.tokens < self._vocab)).all():
            raise ValueError(f"a token in the delta is outside 0..{self._vocab - 1}")
        above = np.concatenate((tree.logprob[:there], delta.weights))[places]
        if not (delta.weights <= above).all():  # also rejects NaN
            raise ValueError("a node in the delta has a larger weight than its parent")
        if ((delta.weights < MIN_WEIGHT) & (delta.weights > NEG_INF)).any():
            raise ValueError(f"a weight in the delta is below {MIN_WEIGHT}")
        if len(np.unique(places * self._vocab + delta.tokens)) < n:
            raise ValueError("the delta has the same token twice under one parent")
        return places

    def _add_nodes(self, parents: Ints, delta: TreeDelta) -> None:
        """Adds the nodes of a delta to the tree. `parents`: node index of each node's parent. Raises ValueError if a
        parent was expanded by an earlier delta, or if there are not enough tree slots."""
        tree, new = self.tree, slice(self.tree.count, self.tree.count + len(delta))
        expanded: NDArray[np.int64] = np.unique(parents)
        if tree.expanded + len(expanded) > tree.slots or (tree.slot[expanded] < tree.slots).any():
            raise ValueError("a parent in the delta was already expanded, or the tree slots are full")
        tree.token[new], tree.parent[new], tree.logprob[new] = delta.tokens, parents, delta.weights
        while len(expanded) > 0:  # one generation per iteration, ancestors first
            above = tree.slot[tree.parent[expanded]]
            here = (above < tree.slots) | (expanded == 0)
            tree.assign_slots(expanded[here])
            expanded = expanded[~here]
        tree.sizes[0] = new.stop
        self._ids.add(len(delta))
