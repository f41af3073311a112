"""The replica compared with the draft's tree and with plain paths, however late deltas and results arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swiftspec.backends.cpu.decoder import HostDecoder
from swiftspec.runtime.executors.native_tree import NativeTree
from swiftspec.tree.replica import NodeIds, TreeDelta, TreeReplica, merge_deltas
from swiftspec.tree.tree import NEG_INF, DraftTree
from tests.support.cases import examples

SLOTS, CHILDREN, VOCAB, ROOT = 24, 3, 5, 4
Path = tuple[int, ...]  # tokens from the first root on


class ReplicaMachine(RuleBasedStateMachine):
    """A draft that expands and processes results, and a replica that receives both late. `known` has the delivered
    nodes: their paths, in the order of creation, with their weights summed over all re-roots."""

    def make(self) -> DraftTree:
        return DraftTree(1 + SLOTS * CHILDREN, SLOTS)

    def __init__(self) -> None:
        super().__init__()
        self.tree, self.ids = self.make(), NodeIds()
        self.tree.reset(ROOT)
        self.ids.open()
        self.replica = TreeReplica(self.make(), VOCAB)
        self.replica.open(ROOT, 0)
        self.text: Path = (ROOT,)
        self.round = self.applied = 0
        self.results: deque[Path] = deque()  # not yet processed by the draft
        self.deltas: deque[tuple[TreeDelta, dict[Path, float]]] = deque()  # under way
        self.base, self.weight = (ROOT,), 0.0  # position and weight of the draft's root
        self.known: dict[Path, float] = {(ROOT,): 0.0}
        self.roots: dict[Path, float] = {}  # re-roots of the draft since its last delta

    @precondition(lambda self: self.tree.expandable_leaves(CHILDREN) >= 3)
    @rule(w=st.integers(1, 3), count=st.integers(1, 2), data=st.data())
    def grow(self, w: int, count: int, data: st.DataObject) -> None:
        first, before = self.ids.next, self.tree.count
        for _ in range(count):
            if self.tree.expandable_leaves(CHILDREN) < w or len(nodes := self.tree.best_leaves(w).nodes) == 0:
                break
            weights = st.sampled_from([0.0, -0.5, -1.0, -1.0, -3.0, NEG_INF])  # ties, sure children, dead children
            tokens = [data.draw(st.permutations(range(VOCAB)))[:CHILDREN] for _ in nodes]
            logprobs = [[data.draw(weights) for _ in range(CHILDREN)] for _ in nodes]
            self.tree.add_children(nodes, np.array(tokens), np.array(logprobs))
        new = slice(before, self.tree.count)
        self.ids.add(self.tree.count - before)
        parents, weights = self.ids.ids[self.tree.parent[new]], self.tree.logprob[new].copy()
        delta = TreeDelta(
            1, self.applied, len(self.base) - 1, count, first, parents, self.tree.token[new].copy(), weights
        )
        paths = [(*self.base, *path) for path in self.tree.path_tokens(range(before, self.tree.count))]
        self.send(delta, dict(zip(paths, (weights + self.weight).tolist(), strict=True)))

    @rule(data=st.data())
    def verify(self, data: st.DataObject) -> None:
        """The target accepts a path that the draft has, or had, possibly with a token beyond it."""
        below = [path for path in self.known if path[: len(self.text)] == self.text]
        held = [(*self.base, *path) for path in self.tree.path_tokens(range(self.tree.count))]
        paths = [*below, *(path for path in held if path[: len(self.text)] == self.text), self.text]
        path = data.draw(st.sampled_from(paths))
        extra = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=int(path == self.text), max_size=2))
        tokens = (*path[len(self.text) :], *extra)
        self.text, self.round = (*self.text, *tokens), self.round + 1
        self.results.append(tokens)
        self.replica.follow(tokens, self.round)

    @precondition(lambda self: self.results)
    @rule(speaks=st.booleans())
    def take_in(self, speaks: bool) -> None:
        tokens = self.results.popleft()
        node = self.ids.follow(self.tree, tokens)
        self.base, self.applied = (*self.base, *tokens), self.applied + 1
        weight = NEG_INF if node is None else float(self.tree.logprob[node])
        self.weight = self.weight + weight if weight > NEG_INF else 0.0
        if node is None:
            self.tree.reset(tokens[-1])
        else:
            self.tree.reroot(node)
        self.roots[self.base] = self.weight
        if speaks:
            empty = np.array([], np.int64)
            self.send(
                TreeDelta(
                    1, self.applied, len(self.base) - 1, 1, self.ids.next, empty, empty, empty.astype(np.float64)
                ),
                {},
            )

    def send(self, delta: TreeDelta, nodes: dict[Path, float]) -> None:
        self.deltas.append((delta, self.roots | nodes))
        self.roots = {}

    @precondition(lambda self: self.deltas)
    @rule(most=st.integers(1, 4))
    def deliver(self, most: int) -> None:
        """One delta, or several of a round as one."""
        together, round_ = list[TreeDelta](), self.deltas[0][0].round
        while self.deltas and self.deltas[0][0].round == round_ and len(together) < most:
            delta, nodes = self.deltas.popleft()
            together.append(delta)
            self.known |= nodes
        self.replica.apply(merge_deltas(together))

    @rule(bs=st.integers(1, 9))
    def propose(self, bs: int) -> None:
        tokens, parents, weights = self.replica.best(bs)
        paths: list[Path] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*paths[parent], token) if parent >= 0 else self.text)
        assert tokens[0] == self.text[-1] and paths == self.expected(bs)
        root = self.known.get(self.text, NEG_INF)
        want = [0.0] if root == NEG_INF else [self.known[path] - root for path in paths]
        assert weights == pytest.approx(want) and weights == sorted(weights, reverse=True)

    def expected(self, bs: int) -> list[Path]:
        """By weight, the earlier of equal ones first; only the root if it was not delivered, or is dead."""
        if self.known.get(self.text, NEG_INF) == NEG_INF:
            return [self.text]
        below = [path for path in self.known if path[: len(self.text)] == self.text]
        live = [path for path in below if self.known[path] > NEG_INF]
        return sorted(live, key=lambda path: -self.known[path])[:bs]

    @invariant()
    def the_same_when_all_has_come(self) -> None:
        if not (self.deltas or self.results or self.roots):
            assert self.replica.best(9) == self.tree.best_subtree(9)[1:]
            assert self.replica.expected_mass(9, 3) == self.tree.expected_mass(9, 3)


class NativeReplicaMachine(ReplicaMachine):
    def make(self) -> DraftTree:
        return NativeTree(1 + SLOTS * CHILDREN, SLOTS, HostDecoder.tree)


for _machine in (ReplicaMachine, NativeReplicaMachine):
    _machine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=25)
TestReplica = ReplicaMachine.TestCase
TestNativeReplica = NativeReplicaMachine.TestCase


def delta(parents: Sequence[int], tokens: Sequence[int], weights: Sequence[float], first: int = 1) -> TreeDelta:
    return TreeDelta(1, 0, 7, 1, first, np.array(parents), np.array(tokens), np.array(weights))


GOOD = delta([0, 0, 1], [1, 2, 1], [-1.0, -2.0, -1.5])
BAD = {
    "expected round 0": replace(GOOD, round=1),
    "after 6 verified tokens, expected 7": replace(GOOD, prefix_len=6),
    "expected node 1": replace(GOOD, first=2),
    "does not fit 7 free nodes": delta([0] * 9, range(9), [-1.0] * 9),
    "not in the tree": delta([0, 2], [1, 2], [-1.0, -2.0]),
    "not in the tree, either": delta([-1], [1], [-1.0]),
    "outside 0..4": delta([0], [VOCAB], [-1.0]),
    "larger weight than its parent": delta([0, 1], [1, 1], [-1.0, -0.5]),
    "larger weight than its parent, or NaN": delta([0], [1], [float("nan")]),
    "weight in the delta is below": delta([0], [1], [-1e39]),
    "same token twice": delta([0, 0], [1, 1], [-1.0, -1.0]),
    "tree slots are full": delta([0, 1, 2, 3], [1, 1, 1, 1], [-1.0] * 4),
}


@pytest.mark.parametrize("reason", BAD)
def test_invalid_deltas_change_nothing(reason: str) -> None:
    replica = TreeReplica(DraftTree(8, 3), VOCAB)
    replica.open(ROOT, 7)
    with pytest.raises(ValueError, match=reason.partition(",")[0]):
        replica.apply(BAD[reason])
    replica.apply(GOOD)
    assert replica.best(9) == ([ROOT, 1, 1, 2], [-1, 0, 1, 0], [0.0, -1.0, -1.5, -2.0])
    with pytest.raises(ValueError, match="already expanded"):
        replica.apply(delta([1], [2], [-1.5], first=4))


def test_deltas_that_are_not_consecutive_are_not_merged() -> None:
    with pytest.raises(ValueError, match="delta starts at node 5, expected node 4"):
        merge_deltas([GOOD, replace(GOOD, first=5)])
