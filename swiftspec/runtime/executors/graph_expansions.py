"""Graph executor of expansions: several expansions of a draft tree as one CUDA graph.

The tree is copied to the device, expanded there and copied back: two copies and one wait of the host instead of one
wait per expansion. In a tensor-parallel group the collectives must be kernels on peer memory; each rank then has its
own graph and computes the same tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from swiftspec.backends.reference import Scores
from swiftspec.backends.reference.sampling import calibrated_scores
from swiftspec.model.batch import Batch
from swiftspec.runtime.executors import ExecutorRequest
from swiftspec.runtime.executors.graph import (
    CapturedGraph,
    GraphCache,
    GraphForwardExecutor,
    StaticNoiseBuffer,
    load_bias,
)
from swiftspec.runtime.runner import Runner
from swiftspec.sampling.logits_params import PROCESSED, RAW, LogitsParams
from swiftspec.sampling.noise import PositionNoise
from swiftspec.tree.tree import DraftTree


class ExpansionRows(Protocol):
    """The rows of one expansion, in tensors that the next expansion overwrites."""

    @property
    def tokens(self) -> Tensor: ...  # [w] int64
    @property
    def positions(self) -> Tensor: ...  # [w] int64, absolute
    @property
    def slots(self) -> Tensor: ...  # [w] int64, counted from the start of the sequence
    @property
    def mask(self) -> Tensor: ...  # [w, tree slots] bool, over the whole tree region


class DeviceTreeLike(Protocol):
    """A draft tree that is expanded on the device; backends/cuda/tree.py implements and documents it."""

    children: int
    expansions_left: int
    rows: Any
    state: Tensor  # the whole tree
    logprob: Tensor

    def upload(self, tree: Any, /) -> None: ...
    def restore(self) -> None: ...
    def download(self, tree: Any, /) -> None: ...
    def best_leaves(self, prefix: Tensor, /) -> ExpansionRows: ...
    def add_children(self, tokens: Tensor, logprobs: Tensor, /) -> None: ...


class GraphExpansionExecutor(GraphForwardExecutor):
    """Graph executor of expansions. The root is expanded by a separate forward, because its batch contains the pending
    tokens."""

    name = "graph"
    columns = ("graph of expansions",)

    def __init__(self, runner: Runner, graphs: GraphCache, tree: DeviceTreeLike) -> None:
        super().__init__(runner, graphs)
        self._tree = tree
        device = runner.model.device
        self._numbers = torch.zeros(2, dtype=torch.int64, device=device)  # prefix length, end of the tree region
        self._staged = torch.zeros(2, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._sequence = torch.zeros(len(tree.rows.tokens), dtype=torch.int64, device=device)
        self._noise = StaticNoiseBuffer(runner.vocab, torch.float32, device)
        self._values, self._bias = LogitsParams(device), torch.zeros(runner.vocab, device=device)

    def open(self, request: ExecutorRequest) -> None:
        super().open(request)
        shape, sampler = request.expansion, request.sampler
        assert shape is not None
        self._noisy = shape.coupled and not sampler.params.greedy
        self._values.load(sampler.params, noisy=self._noisy, tau=shape.tau)
        load_bias(self._bias, sampler)

    def expansion_captures(self, steps: int) -> list[Callable[[], None]]:
        """Returns functions that each capture a graph of at most `steps` expansions. See `forward_captures`."""
        slots = self._tree.rows.mask.shape[1]

        def capture(count: int) -> None:
            self.open_cache()
            # an empty prefix and the whole tree region, as in a request: attention over no slot has no result
            self._numbers.copy_(torch.tensor([0, slots]))
            self._graph(count)

        return [partial(capture, count) for count in powers_of_two(steps)]

    def expand(self, tree: DraftTree, pending: list[int], count: int) -> None:
        if tree.expanded == 0 and count > 0:
            super().expand(tree, pending, 1)
            count -= 1
        if tree.expanded > 0 and 0 < count <= self.expansions_that_fit(tree):
            self._expand_on_device(tree, count)
        else:
            super().expand(tree, pending, count)

    def expansions_that_fit(self, tree: DraftTree) -> int:
        """Returns the number of expansions for which tree and KV cache have space, and after which the tree is not
        deeper than a block of noise (PositionNoise.BLOCK_POSITIONS)."""
        slots = min(tree.expandable_leaves(self._tree.children), self.runner.cache.free_slots)
        return min(slots // len(self._sequence), PositionNoise.BLOCK_POSITIONS - _depth(tree))

    def _expand_on_device(self, tree: DraftTree, count: int) -> None:
        cache, sampler, began = self.runner.cache, self._request.sampler, time.perf_counter()
        prefix = cache.prefix_len[0]
        if self._noisy:
            self._noise.ensure(sampler.noise, prefix + 1, prefix + 1 + _depth(tree) + count)
        self._staged[:] = torch.tensor([prefix, prefix + tree.slots])
        self._numbers.copy_(self._staged, non_blocking=True)
        self._tree.upload(tree)
        with self.runner.translate_peer_errors():
            self._tree.restore()
            for power in binary_parts(count):
                self._graph(power).replay()
            self._tree.download(tree)
        cache.append_tree(count * len(self._sequence))
        for _ in range(count):
            self.runner.record_step(began, len(self._sequence))
            began = time.perf_counter()

    def _graph(self, count: int) -> CapturedGraph:
        """Returns the graph of `count` expansions."""
        return self.graphs.ensure("expansions", count, lambda: self._expansions(count), (self._tree.state,))

    def _expansions(self, count: int) -> Tensor:
        prefix, end = self._numbers.split(1)
        self._tree.expansions_left = count  # `expansions_that_fit` has checked the real number
        for _ in range(count):
            rows = self._tree.best_leaves(prefix)
            batch = Batch(rows.tokens, rows.positions, rows.slots, rows.mask, self._sequence, end)
            # if there are fewer than w leaves, the other rows have arbitrary contents and their children are never used
            self._tree.add_children(*self._children(self.model_forward(batch)[0], rows.positions + 1))
        return self._tree.logprob

    def _children(self, logits: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """As `Sampler.children`, with the same operations, for a graph. `after` [w]: absolute positions of the
        children."""
        runner, count, shard = self.runner, self._tree.children, self.runner.shard
        noise, rows = self._noise.rows(after, range(runner.vocab) if shard is None else shard.tokens, torch.float32)
        if shard is None:
            scores = Scores(bias=self._bias, noise=noise, rows=rows, scalars=self._values.scores[RAW])
            return runner.ops.children(logits, runner.vocab, count, scores)
        bias = self._bias[shard.tokens.start : shard.tokens.stop].to(logits.dtype)
        shaped = logits[:, : len(shard.tokens)] + bias
        scores = Scores(noise=noise, rows=rows, scalars=self._values.scores[PROCESSED])
        return shard.log_top_k(calibrated_scores(shaped / self._values.temperature, scores), count)


def binary_parts(count: int) -> list[int]:
    """Returns the powers of two that sum to `count`, the largest first."""
    return [1 << bit for bit in reversed(range(count.bit_length())) if count >> bit & 1]


def powers_of_two(most: int) -> list[int]:
    """Returns the powers of two up to `most`."""
    return [1 << bit for bit in range(most.bit_length())]


def _depth(tree: DraftTree) -> int:
    """Returns the number of levels of the tree that contain expanded nodes."""
    return int(tree.visible[: tree.expanded].sum(1).max(initial=0))
