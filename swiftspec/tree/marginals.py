"""Draft trees from independent distributions of the tokens at successive positions, as a block head gives them."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from swiftspec.tree.tree import DraftTree, Ints


def add_likely_paths(tree: DraftTree, tokens: Ints, weights: NDArray[np.floating]) -> None:
    """Adds the nodes with the largest weights below the root, until the tree is full: a best-first search.

    `tokens`, `weights` [positions, k]: candidates at depth 1 and deeper, with their log-probabilities, the most likely
    first. The log-weight of a node is the sum along its path. Candidates with the weight -inf are left out. `tree`: has
    no node except the root.
    """
    depths, count = tokens.shape
    rows = weights.tolist()
    # cost of a node, order of insertion, parent, cost of the parent, depth - 1 and rank of its token there
    heap = list[tuple[float, int, int, float, int, int]]()

    def push(parent: int, above: float, depth: int, rank: int) -> None:
        if depth < depths and rank < count and rows[depth][rank] > -np.inf:
            heapq.heappush(heap, (above - rows[depth][rank], pushed[0], parent, above, depth, rank))
            pushed[0] += 1

    pushed = [0]
    push(0, 0.0, 0, 0)
    while heap and tree.count < len(tree.token):
        cost, _, parent, above, depth, rank = heapq.heappop(heap)
        node = tree.count
        here = (slice(depth, depth + 1), slice(rank, rank + 1))
        tree.add_children(np.array([parent]), tokens[here], weights[here])
        push(parent, above, depth, rank + 1)
        push(node, cost, depth + 1, 0)
