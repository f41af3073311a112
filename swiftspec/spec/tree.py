"""The draft tree: maximum-likelihood expansion, the best connected sub-tree, re-rooting (paper section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NEG_INF = float("-inf")


@dataclass(frozen=True, slots=True)
class Leaves:
    """The rows of one expansion. `nodes`, `tokens`, `depths` are [r]; `mask` is [r, tree slots in use after it]."""

    nodes: Tensor
    tokens: Tensor
    depths: Tensor
    mask: Tensor


class DraftTree:
    """A struct of arrays over nodes in order of creation, so a parent's index is below its children's.

    `logprob` sums the draft's log-probabilities from the root (0 there), so a child never outweighs its parent and the
    best nodes always form a connected sub-tree. A node is expanded when it has a tree slot (KV and children); the
    others are leaves. Node 0 is the root; once expanded it has tree slot 0. Dead nodes (weight -inf: a filter forbids
    them) are never expanded or proposed. `visible[s]` is the mask row of tree slot s; the last row, all false, stands
    for "no parent".
    """

    def __init__(
        self, nodes: int, slots: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        self.token = torch.zeros(nodes, dtype=torch.int64, device=device)
        self.parent = torch.zeros(nodes, dtype=torch.int64, device=device)
        self.slot = torch.zeros(nodes, dtype=torch.int64, device=device)  # `slots` where it has none
        self.logprob = torch.zeros(nodes, dtype=dtype, device=device)
        self.visible = torch.zeros(slots + 1, slots, dtype=torch.bool, device=device)
        self.slots = slots
        self.reset(0)

    def reset(self, token: int) -> None:
        """Starts over from an unexpanded root."""
        self.count, self.expanded = 1, 0  # nodes, tree slots in use
        self.token[0] = token
        self.parent[0] = 0
        self.slot.fill_(self.slots)
        self.logprob[0] = 0.0

    def room(self, children: int) -> int:
        """How many more leaves can be expanded into `children` each."""
        return min(self.slots - self.expanded, (self.token.shape[0] - self.count) // children)

    def best_leaves(self, w: int) -> Leaves:
        """Takes the w likeliest leaves (fewer when there are fewer), hands each the next tree slot and its mask row."""
        expanded = self.slot[: self.count] < self.slots
        best = self.logprob[: self.count].masked_fill(expanded, NEG_INF).topk(min(w, self.count))
        rows = sum(weight > NEG_INF for weight in best.values.tolist())
        nodes = best.indices[:rows]
        first, after = self.expanded, self.expanded + rows
        assert after <= self.slots
        parents = self.slot.index_select(0, self.parent.index_select(0, nodes))
        mask = self.visible.index_select(0, parents)
        mask[:, first:after].fill_diagonal_(True)
        self.visible[first:after] = mask
        self.slot.index_copy_(0, nodes, torch.arange(first, after, device=nodes.device))
        self.expanded = after
        return Leaves(nodes, self.token.index_select(0, nodes), mask.sum(-1) - 1, mask[:, :after])

    def add_children(self, nodes: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
        """Hangs `tokens` [r, k] with their `logprobs` [r, k] (never above 0) under the expanded `nodes` [r]."""
        rows, k = tokens.shape
        new = slice(self.count, self.count + rows * k)
        self.token[new] = tokens.flatten()
        self.parent[new].view(rows, k).copy_(nodes[:, None])
        self.logprob[new] = (self.logprob.index_select(0, nodes)[:, None] + logprobs).flatten()
        self.count += rows * k

    def best_subtree(self, bs: int) -> tuple[list[int], list[int], list[int]]:
        """The bs likeliest nodes, root included: (nodes, tokens, parents), in topological order, parents by position.

        Connected because sorting is stable: of equal weights the earlier node, hence the parent, comes first.
        """
        weights, order = self.logprob[: self.count].sort(descending=True, stable=True)
        live = sum(weight > NEG_INF for weight in weights[:bs].tolist())
        nodes = order[:live].sort().values
        place = {node: i for i, node in enumerate(nodes.tolist())}
        parents = [place[p] for p in self.parent.index_select(0, nodes).tolist()]
        return list(place), self.token.index_select(0, nodes).tolist(), [-1, *parents[1:]]

    def walk(self, tokens: Sequence[int]) -> list[int]:
        """The nodes that spell as many leading `tokens` as the tree holds, going down from the root (not included)."""
        path: list[int] = []
        node = 0
        for token in tokens:
            child = (self.parent[1 : self.count] == node) & (self.token[1 : self.count] == token)
            found = child.nonzero()
            if found.shape[0] == 0:
                break
            node = int(found[0, 0]) + 1
            path.append(node)
        return path

    def reroot(self, node: int) -> tuple[list[int], list[int]]:
        """Makes `node` the root and keeps its sub-tree, renumbered in order.

        Returns the old tree slots of the path from the old root to the node's parent, and those of the surviving nodes:
        what `KVCache.commit` takes.
        """
        if node == 0:
            return [], list(range(self.expanded))
        above = self.visible[self.slot[self.parent[node]]].nonzero().flatten().tolist()
        slot = int(self.slot[node])
        if slot == self.slots:  # a leaf: nothing below it
            self.reset(int(self.token[node]))
            return above, []
        old = slice(0, self.count)
        kept_slots = self.visible[: self.expanded, slot].nonzero().flatten()
        inside = self.visible[self.slot[self.parent[old]], slot]
        inside[node] = True
        nodes = inside.nonzero().flatten()
        rename = inside.cumsum(0) - 1
        new = slice(0, nodes.shape[0])
        parent = rename[self.parent[nodes]]
        parent[0] = 0
        slots = torch.full((self.slots + 1,), self.slots, device=nodes.device)
        slots[kept_slots] = torch.arange(kept_slots.shape[0], device=nodes.device)
        self.parent[new] = parent
        slot_of = slots[self.slot[nodes]]
        self.slot.fill_(self.slots)
        self.slot[new] = slot_of
        self.token[new] = self.token[nodes]
        self.logprob[new] = self.logprob[nodes] - self.logprob[node]
        self.count, self.expanded = nodes.shape[0], kept_slots.shape[0]
        self._gather_visible(kept_slots)
        return above, kept_slots.tolist()

    def _gather_visible(self, kept: Tensor) -> None:
        """Renumbers the mask rows after the surviving slots; columns that no row sees any more become false."""
        n = kept.shape[0]
        rows = self.visible[kept][:, kept]
        self.visible.zero_()
        self.visible[:n, :n] = rows

    def path_tokens(self, nodes: Tensor) -> list[list[int]]:
        """Tokens from below the root down to each node, for penalties that follow the path."""
        parent, token = self.parent[: self.count].tolist(), self.token[: self.count].tolist()
        paths = []
        for node in nodes.tolist():
            path = []
            while node != 0:
                path.append(token[node])
                node = parent[node]
            paths.append(path[::-1])
        return paths
