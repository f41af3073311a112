"""A draft's round on the device: several expansions in a row as one graph, in which nobody waits for the host.

The tree goes to the device, grows there and comes back: two copies and one wait a round, in place of a wait for each
expansion. What a graph holds by value is its key; all else it reads where it lies. The ranks of a group whose kernels
sum and gather by themselves have a graph each, and the same tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from swiftspec.backends.cuda.sampling import MOST_CANDIDATES
from swiftspec.backends.cuda.tree import MOST_LEAVES, DeviceTree
from swiftspec.backends.reference import Scores
from swiftspec.distributed.groups.peers import PeerParallel
from swiftspec.model.batch import Batch
from swiftspec.runtime.graph import Capture
from swiftspec.runtime.runner import Runner
from swiftspec.sampling.noise import HeldNoise, PositionNoise
from swiftspec.sampling.vocab import VocabShard
from swiftspec.tree.tree import DraftTree

MOST_GRAPHS = 8
Key = tuple[int, float, float, bool]  # expansions, temperature, tau, with noise


class Ops(Protocol):
    """The operators that take part beside the model's."""

    def children(self, logits: Tensor, vocab: int, k: int, scores: Scores, /) -> tuple[Tensor, Tensor]: ...


class DraftRounds:
    """Expansions of one draft without the host. The root and tokens without KV must have had their forward."""

    def __init__(self, runner: Runner, ops: Ops, tree: DeviceTree, capture: Capture, vocab: int) -> None:
        self._runner, self._ops, self._tree, self._capture, self._vocab = runner, ops, tree, capture, vocab
        device = tree.state.device
        self._numbers = torch.zeros(2, dtype=torch.int64, device=device)  # prefix, end of the region
        self._staged = torch.zeros(2, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._sequence = torch.zeros(len(tree.rows.nodes), dtype=torch.int64, device=device)
        self._noise = HeldNoise(vocab, torch.float32, device)
        self._graphs: dict[Key, Callable[[], None]] = {}
        self._bound: tuple[object, object] = (None, None)  # the model and the keys that the graphs know

    @staticmethod
    def of(runner: Runner, leaves: int, children: int, vocab: int) -> DraftRounds | None:
        """None where model or operators cannot do without the host, or the tree is too wide for them."""
        make, capture, group = getattr(runner.ops, "DeviceTree", None), runner.capture, runner.model.group
        fits = leaves <= MOST_LEAVES and children <= min(MOST_CANDIDATES, vocab)
        if make is None or capture is None or not fits:
            return None
        device = runner.model.device
        message = torch.empty(leaves, 2 * children + 1, dtype=torch.float64, device=device)  # VocabShard.log_top_k's
        if group is not None and not (isinstance(group, PeerParallel) and group.takes(message)):
            return None
        ops: Any = runner.ops
        return DraftRounds(runner, ops, make(runner.tree_slots, children, leaves, device), capture, vocab)

    def room(self, tree: DraftTree) -> int:
        """How many expansions fit into tree and cache; and the tree may not become deeper than a block of noise."""
        w = len(self._tree.rows.nodes)
        slots = min(tree.room(self._tree.children), self._runner.cache.room)
        return min(slots // w, PositionNoise.BLOCK - _depth(tree))

    def grow(self, tree: DraftTree, count: int, *, temperature: float, tau: float, noise: PositionNoise | None) -> None:
        """`count` expansions, at most `room`, of the w likeliest leaves each. Scores as in `Sampler.children`."""
        cache, began = self._runner.cache, time.perf_counter()
        if self._bound[0] is not self._runner.model or self._bound[1] is not cache.k:
            self._graphs.clear()
            self._bound = self._runner.model, cache.k
        prefix = cache.prefix_len[0]
        if noise is not None:
            self._noise.hold(noise, prefix + 1, prefix + 1 + _depth(tree) + count)
        self._staged[:] = torch.tensor([prefix, prefix + tree.slots])
        self._numbers.copy_(self._staged, non_blocking=True)
        self._tree.put(tree)
        key = (count, temperature, tau, noise is not None)
        with self._runner.naming_lost():
            if key not in self._graphs:
                if len(self._graphs) == MOST_GRAPHS:
                    del self._graphs[next(iter(self._graphs))]
                self._graphs[key] = self._capture(lambda: self._expand(*key))[1]
            self._graphs[key]()
            self._tree.take(tree)
        cache.append_tree(count * len(self._sequence))
        self._runner.busy += time.perf_counter() - began

    def _expand(self, count: int, temperature: float, tau: float, noisy: bool) -> Tensor:
        prefix, end = self._numbers.split(1)
        self._tree.restore()
        for _ in range(count):
            rows = self._tree.best_leaves(prefix)
            batch = Batch(rows.tokens, rows.positions, rows.slots, rows.mask, self._sequence, end)
            logits = self._runner.model.forward(batch, self._runner.cache)
            assert logits is not None
            # rows without a leaf may lie anywhere; their children are nobody's
            self._tree.add_children(*self._children(logits, temperature, tau, rows.positions + 1 if noisy else None))
        return self._tree.logprob

    def _children(self, logits: Tensor, temperature: float, tau: float, after: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `Sampler.children`, operation by operation. `after`: the children's positions, where there is noise."""
        group, count = self._runner.model.group, self._tree.children
        if group is None:
            if after is None:
                return self._ops.children(logits, self._vocab, count, Scores(temperature * tau))
            noise, places = self._noise.rows(after, range(self._vocab), torch.float32)
            return self._ops.children(logits, self._vocab, count, Scores(temperature, None, noise, places, tau))
        shard = VocabShard(group, logits.shape[-1], self._vocab)
        scores = logits[:, : len(shard.tokens)] / temperature
        if after is not None:
            noise, places = self._noise.rows(after, shard.tokens, torch.float32)
            scores = scores + noise[places]
        return shard.log_top_k(scores / tau, count)


def _depth(tree: DraftTree) -> int:
    """How many levels of the tree are expanded."""
    return int(tree.visible[: tree.expanded].sum(1).max(initial=0))
