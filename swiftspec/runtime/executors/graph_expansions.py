"""Graph executor of expansions: several expansions of a draft tree as one CUDA graph.

The tree is copied to the device, expanded there and copied back: two copies and one wait of the host instead of one
wait per expansion. After a reset the batch of the root and the pending tokens is copied instead, and a graph makes the
tree from it. In a tensor-parallel group the collectives must be kernels on peer memory; each rank then has its own
graphs and computes the same tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.backends.reference.sampling import Scores, calibrated_scores
from swiftspec.model.batch import Batch
from swiftspec.runtime.executors import ExecutorRequest
from swiftspec.runtime.executors.graph import (
    CAPTURED_ROWS,
    BatchShape,
    CapturedGraph,
    GraphCache,
    GraphForwardExecutor,
    RowOutputs,
    StaticNoiseBuffer,
    load_bias,
)
from swiftspec.runtime.executors.native_tree import NativeTreeHandle
from swiftspec.runtime.runner import Runner
from swiftspec.sampling.logits_params import PROCESSED, RAW, LogitsParams
from swiftspec.sampling.noise import PositionNoise
from swiftspec.tree.tree import DraftTree

ROOT_GRAPHS = "roots"  # graph set: expansions of a root together with its pending tokens


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
    state: Tensor  # the whole tree, `region` and `logprob` included
    region: Tensor
    logprob: Tensor

    def host_tree(self, arrays: Sequence[NDArray], /) -> NativeTreeHandle: ...
    def upload(self, tree: Any, prefix: int, /) -> None: ...
    def download(self, tree: Any, slots: int, /) -> None: ...
    def add_root(self, token: Tensor, slot: Tensor, tokens: Tensor, logprobs: Tensor, /) -> None: ...
    def best_leaves(self, prefix: Tensor, /) -> ExpansionRows: ...
    def add_children(self, tokens: Tensor, logprobs: Tensor, /) -> None: ...


@dataclass(frozen=True, slots=True)
class ExpansionTensors:
    """What the expansion graphs of a model read besides the tree, for the one request whose parameters are loaded."""

    sequence: Tensor  # [w] int64, index of the rows' sequence in the cache
    noise: StaticNoiseBuffer
    values: LogitsParams
    bias: Tensor  # [vocab]

    @staticmethod
    def of(runner: Runner, leaves: int) -> ExpansionTensors:
        """Returns the tensors for the model of a runner and `leaves` rows per expansion."""
        device = runner.model.device
        return ExpansionTensors(
            torch.zeros(leaves, dtype=torch.int64, device=device),
            StaticNoiseBuffer(runner.vocab, torch.float32, device),
            LogitsParams(device),
            torch.zeros(runner.vocab, device=device),
        )


class GraphExpansionExecutor(GraphForwardExecutor):
    """Graph executor of expansions. The root has graphs of its own, because its batch contains the pending tokens."""

    name = "graph"
    columns = ("graph of expansions",)

    def __init__(self, runner: Runner, graphs: GraphCache, tree: DeviceTreeLike) -> None:
        super().__init__(runner, graphs)
        self._tree = tree
        self._static = graphs.shared("expansions", lambda: ExpansionTensors.of(runner, len(tree.rows.tokens)))

    def open(self, request: ExecutorRequest) -> None:
        super().open(request)
        assert request.expansion is not None
        self._noisy = request.expansion.coupled and not request.sampler.params.greedy

    def load_parameters(self, request: ExecutorRequest) -> None:
        super().load_parameters(request)
        shape, static = request.expansion, self._static
        assert shape is not None
        static.values.load(request.sampler.params, noisy=self._noisy, tau=shape.tau)
        load_bias(static.bias, request.sampler)
        static.sequence.fill_(self.runner.cache.buffers[0])

    def expansion_captures(self, steps: int, roots: Sequence[BatchShape]) -> list[Callable[[], None]]:
        """Returns functions that each capture the expansion of a root whose batch has one of the shapes `roots`, or at
        most `steps` expansions after it. See `forward_captures`."""
        slots, lengths = self._tree.rows.mask.shape[1], self.captured_lengths()

        def capture_root(shape: BatchShape, kv_len: int) -> None:
            self.open_cache()
            self.capture_batch(ROOT_GRAPHS, shape, kv_len, self._expand_root)
            if (shape, kv_len) == (roots[-1], lengths[-1]):
                self.graphs.mark_complete(ROOT_GRAPHS)

        def capture(count: int) -> None:
            self.open_cache()
            # an empty prefix and the whole tree region, as in a request: attention over no slot has no result
            self._tree.region.copy_(torch.tensor([0, slots]))
            self._graph(count)

        root_captures = [partial(capture_root, shape, kv_len) for kv_len in lengths for shape in roots]
        return [*root_captures, *(partial(capture, count) for count in powers_of_two(steps))]

    def expand(self, tree: DraftTree, pending: list[int], count: int) -> None:
        fits = not self.runner.in_company and 0 < count <= self.expansions_that_fit(tree, len(pending))
        if fits and len(pending) < CAPTURED_ROWS[-1] and self.has_room(tree, pending):
            self._expand_on_device(tree, pending, count)
        else:
            super().expand(tree, pending, count)

    def expansions_that_fit(self, tree: DraftTree, pending: int) -> int:
        """Returns the number of expansions for which tree and KV cache have space, and after which the tree is not
        deeper than a block of noise (PositionNoise.BLOCK_POSITIONS). `pending`: number of pending tokens."""
        root = int(tree.expanded == 0)  # takes one slot, each further expansion w
        free = self.runner.cache.free_slots - pending
        slots = min(tree.expandable_leaves(self._tree.children), free) - root
        return min(slots // len(self._static.sequence) + root, PositionNoise.BLOCK_POSITIONS - _depth(tree))

    def _expand_on_device(self, tree: DraftTree, pending: list[int], count: int) -> None:
        runner, began, w = self.runner, time.perf_counter(), len(self._static.sequence)
        self.load_request()
        batch = runner.chain_batch([*pending, int(tree.token[0])]) if tree.expanded == 0 else None
        pending.clear()
        prefix, further = runner.cache.prefix_len[0], count - (batch is not None)
        if self._noisy:
            self._static.noise.ensure(self._request.sampler.noise, prefix + 1, prefix + 1 + _depth(tree) + count)
        with runner.translate_peer_errors():
            if batch is None:
                self._tree.upload(tree, prefix)
            else:
                self.run_batch(ROOT_GRAPHS, batch, self._expand_root)
            for power in binary_parts(further):
                self._graph(power).replay()
            runner.cache.append_tree(further * w)
            self._tree.download(tree, runner.cache.tree_len)
        for rows in [*([] if batch is None else [len(batch)]), *[w] * further]:
            runner.record_step(began, rows)
            began = time.perf_counter()

    def _expand_root(self, batch: Batch) -> RowOutputs:
        """Makes a tree of the root, the last row of a batch with the pending tokens, and its children."""
        logits, last = self.model_forward(batch)[0], slice(len(batch) - 1, len(batch))
        children = self._children(logits[last], batch.positions[last] + 1)
        self._tree.add_root(batch.tokens[last], batch.slots[last], *children)
        return self._tree.logprob, None

    def _graph(self, count: int) -> CapturedGraph:
        """Returns the graph of `count` expansions."""
        return self.graphs.ensure("expansions", count, lambda: self._expansions(count), (self._tree.state,))

    def _expansions(self, count: int) -> Tensor:
        prefix, end = self._tree.region.split(1)
        # that of the request in the place of all sequences: the others have no rows
        kv_len = end.repeat(len(self.runner.cache.buffer_kv_len()))
        self._tree.expansions_left = count  # `expansions_that_fit` has checked the real number
        for _ in range(count):
            rows = self._tree.best_leaves(prefix)
            batch = Batch(rows.tokens, rows.positions, rows.slots, rows.mask, self._static.sequence, kv_len)
            # if there are fewer than w leaves, the other rows have arbitrary contents and their children are never used
            self._tree.add_children(*self._children(self.model_forward(batch)[0], rows.positions + 1))
        return self._tree.logprob

    def _children(self, logits: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """As `Sampler.children`, with the same operations, for a graph. `after` [w]: absolute positions of the
        children."""
        runner, count, shard, static = self.runner, self._tree.children, self.runner.shard, self._static
        noise, rows = static.noise.rows(after, range(runner.vocab) if shard is None else shard.tokens, torch.float32)
        if shard is None:
            scores = Scores(bias=static.bias, noise=noise, rows=rows, scalars=static.values.scores[RAW])
            return runner.ops.children(logits, runner.vocab, count, scores)
        bias = static.bias[shard.tokens.start : shard.tokens.stop].to(logits.dtype)
        shaped = logits[:, : len(shard.tokens)] + bias
        scores = Scores(noise=noise, rows=rows, scalars=static.values.scores[PROCESSED])
        return shard.log_top_k(calibrated_scores(shaped / static.values["temperature"], scores), count)


def binary_parts(count: int) -> list[int]:
    """Returns the powers of two that sum to `count`, the largest first."""
    return [1 << bit for bit in reversed(range(count.bit_length())) if count >> bit & 1]


def powers_of_two(most: int) -> list[int]:
    """Returns the powers of two up to `most`."""
    return [1 << bit for bit in range(most.bit_length())]


def _depth(tree: DraftTree) -> int:
    """Returns the number of levels of the tree that contain expanded nodes."""
    return int(tree.visible[: tree.expanded].sum(1).max(initial=0))
