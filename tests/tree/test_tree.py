"""The draft tree compared with a tree of plain Python nodes, for any order of expansions and re-roots."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swiftspec.backends.cpu.decoder import HostDecoder
from swiftspec.runtime.executors.native_tree import NativeTree
from swiftspec.tree.tree import NEG_INF, DraftTree
from tests.support.cases import examples

SLOTS, CHILDREN, VOCAB = 24, 3, 7


@dataclass(eq=False)
class Node:
    token: int
    parent: Node | None
    weight: float
    slot: int | None = None
    children: list[Node] = field(default_factory=list)

    def ancestry(self) -> list[Node]:
        return [*(self.parent.ancestry() if self.parent else []), self]


class TreeMachine(RuleBasedStateMachine):
    """`nodes` lists the live nodes in order of creation, as the tree numbers them."""

    def make(self) -> DraftTree:
        return DraftTree(1 + SLOTS * CHILDREN, SLOTS)

    def __init__(self) -> None:
        super().__init__()
        self.tree = self.make()
        self.tree.reset(5)
        self.nodes = [Node(5, None, 0.0)]
        self.used = 0

    @precondition(lambda self: self.tree.expandable_leaves(CHILDREN) >= 4)
    @rule(w=st.integers(1, 4), data=st.data())
    def expand(self, w: int, data: st.DataObject) -> None:
        live = [n for n in self.nodes if n.slot is None and n.weight > NEG_INF]
        weights = sorted((n.weight for n in live), reverse=True)[:w]
        leaves = self.tree.best_leaves(w)
        expected = [self.nodes[i] for i in leaves.nodes.tolist()]
        assert leaves.nodes.tolist() == sorted(leaves.nodes.tolist())
        assert all(n in live for n in expected)
        np.testing.assert_allclose(sorted((n.weight for n in expected), reverse=True), weights)
        for row, node in enumerate(expected):
            node.slot = self.used + row
            seen = np.flatnonzero(leaves.mask[row]).tolist()
            assert seen == sorted(n.slot for n in node.ancestry() if n.slot is not None)
            assert leaves.tokens[row] == node.token and leaves.depths[row] == len(node.ancestry()) - 1
        self.used += len(expected)
        assert leaves.mask.shape == (len(expected), self.used)
        if not expected:
            return
        weights = st.sampled_from([0.0, -0.5, -1.0, -1.0, -3.0, NEG_INF])  # ties, sure children, dead children
        logprobs = [[data.draw(weights) for _ in range(CHILDREN)] for _ in expected]
        tokens = [data.draw(st.permutations(range(VOCAB)))[:CHILDREN] for _ in expected]
        self.tree.add_children(leaves.nodes, np.array(tokens), np.array(logprobs))
        for node, row, weight in zip(expected, tokens, logprobs, strict=True):
            node.children = [Node(t, node, node.weight + lp) for t, lp in zip(row, weight, strict=True)]
            self.nodes += node.children

    @rule(data=st.data())
    def reroot(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.nodes) - 1))
        root = self.nodes[index]  # it may be dead: the target accepts tokens that the draft's filter excludes
        old = self.nodes[0]
        path = root.ancestry()[:-1]
        above, keep = self.tree.reroot(index)
        assert above == [n.slot for n in path]
        self.nodes = [n for n in self.nodes if root in n.ancestry()]
        survivors = sorted((n for n in self.nodes if n.slot is not None), key=lambda n: n.slot or 0)
        assert keep == [n.slot for n in survivors]
        for slot, node in enumerate(survivors):
            node.slot = slot
        for node in self.nodes[1:]:
            node.weight -= root.weight
        root.weight, root.parent, self.used = 0.0, None, len(survivors)
        assert old is root or path[0] is old

    @rule(bs=st.integers(1, 9))
    def propose(self, bs: int) -> None:
        chosen, tokens, parents, weights = self.tree.best_subtree(bs)
        live = [n for n in self.nodes if n.weight > NEG_INF]
        best = sorted((n.weight for n in live), reverse=True)[:bs]
        np.testing.assert_allclose(sorted((self.nodes[i].weight for i in chosen), reverse=True), best)
        np.testing.assert_allclose(weights, [self.nodes[i].weight for i in chosen], rtol=1e-6, atol=1e-9)
        assert weights == sorted(np.array(weights, np.float32).tolist(), reverse=True), (
            "float32 numbers, the largest first"
        )
        assert chosen[0] == 0 and parents[0] == -1
        for place in range(1, len(chosen)):
            node = self.nodes[chosen[place]]
            assert 0 <= parents[place] < place and self.nodes[chosen[parents[place]]] is node.parent
            assert tokens[place] == node.token

    @rule(bs=st.integers(1, 9), w=st.integers(1, 4), data=st.data())
    def prospects(self, bs: int, w: int, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from([i for i, node in enumerate(self.nodes) if node.weight > NEG_INF]))
        root = self.nodes[index]
        below = [n for n in self.nodes if root in n.ancestry()]
        chances = sorted((math.exp(n.weight - root.weight) for n in below), reverse=True)
        leaves = sorted((math.exp(n.weight - root.weight) for n in below if n.slot is None), reverse=True)
        np.testing.assert_allclose(
            self.tree.expected_mass(bs, w, index), (sum(chances[:bs]), sum(leaves[:w])), atol=1e-9
        )

    @rule(data=st.data())
    def walk(self, data: st.DataObject) -> None:
        tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=5))
        node, path = self.nodes[0], []
        for token in tokens:
            found = [c for c in node.children if c.token == token]
            if not found:
                break
            node = found[0]
            path.append(self.nodes.index(node))
        assert self.tree.match_prefix(tokens) == path

    @invariant()
    def arrays_hold(self) -> None:
        tree, n = self.tree, len(self.nodes)
        assert (tree.count, tree.expanded) == (n, self.used)
        np.testing.assert_allclose(tree.logprob[:n], [node.weight for node in self.nodes], atol=1e-9, rtol=0)
        slots = [SLOTS if node.slot is None else node.slot for node in self.nodes]
        assert tree.slot[:n].tolist() == slots
        for node, slot in zip(self.nodes, slots, strict=True):
            if node.slot is not None:  # slot order is topological, the root first
                assert all((a.slot or 0) <= slot for a in node.ancestry())
        paths = tree.path_tokens(np.arange(n))
        assert paths == [[a.token for a in node.ancestry()[1:]] for node in self.nodes]

    @invariant()
    def columns_are_reference_counts(self) -> None:
        """A slot's mask column sums to the expanded nodes that descend from it or are it."""
        rows = self.tree.visible[: self.used, : self.used]
        for node in self.nodes:
            if node.slot is not None:
                below = [n for n in self.nodes if n.slot is not None and node in n.ancestry()]
                assert int(rows[:, node.slot].sum()) == len(below)


class NativeTreeMachine(TreeMachine):
    def make(self) -> DraftTree:
        return NativeTree(1 + SLOTS * CHILDREN, SLOTS, HostDecoder.tree)


for _machine in (TreeMachine, NativeTreeMachine):
    _machine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=25)
TestTree = TreeMachine.TestCase
TestNativeTree = NativeTreeMachine.TestCase
