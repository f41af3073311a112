"""CUDA graphs: capture and replay, the noise that graphs read, and the executor whose forwards are graphs.

All calls of torch's CUDA graph API are in this module.

A graph reads and writes tensors at fixed addresses. Everything that is fixed when it is captured, such as shapes and a
temperature, is part of its key. The shape of a forward is the number of rows per sequence, padded to one of
`CAPTURED_ROWS`, and the width of the mask window, which tree/mask.py has already padded. Padding rows repeat the last
row: they write the same KV to the same slots, and their logits are unused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from swiftspec.model.batch import Batch, HostBatch
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors import FEATURES, ExecutorRequest, Features
from swiftspec.runtime.executors.eager import EagerExecutor
from swiftspec.runtime.runner import Runner
from swiftspec.sampling.noise import PositionNoise

T = TypeVar("T")
RowOutputs = tuple[Tensor, Tensor | None]  # a tensor with one row per row of a batch, such as logits; hidden states

CAPTURED_ROWS = (1, 2, 4, 8, 16, 32)  # rows per sequence of captured batches; larger batches run eagerly
MAX_GRAPH_SETS = 5  # graph sets that are kept: forwards, and four combinations of logits parameters
WARM_UP_RUNS = 2  # runs before a capture, since one-time set-up and tuning must not be captured
INT64_BYTES = 8
FORWARD_GRAPHS, ROUND_GRAPHS = "forwards", "rounds"  # graph sets: forwards of a model, rounds of a population


def _nothing() -> None:
    """Does nothing; the default `restore`."""


class Capture(Protocol):
    """Captures the operators that `work` launches as a CUDA graph. Returns the output of `work`, a tensor or a tuple of
    tensors, and a function that replays the graph, which reads the current contents of the input tensors and overwrites
    the output. `restore`: undoes the changes of a run of `work`; called after each warm-up run."""

    def __call__(
        self, work: Callable[[], T], restore: Callable[[], None] = _nothing, /
    ) -> tuple[T, Callable[[], None]]: ...


class GraphInputs:
    """The input batch of a captured forward, in one device buffer, so that one copy fills it. `rows`: rows per
    sequence. `width`: width of the mask window. `sequences`: sequences in the KV cache."""

    def __init__(self, rows: int, width: int, sequences: int, device: torch.device) -> None:
        count = rows * sequences
        words = 3 * count + sequences
        size = INT64_BYTES * words + count * width
        self._staged = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._placed = torch.empty(size, dtype=torch.uint8, device=device)
        tokens, positions, slots, kv_len = (
            self._placed[: INT64_BYTES * words].view(torch.int64).split((*[count] * 3, sequences))
        )
        mask = self._placed[INT64_BYTES * words :].view(torch.bool).view(count, width)
        sequence = torch.arange(sequences, device=device).repeat_interleave(rows)
        self.batch = Batch(tokens, positions, slots, mask, sequence, kv_len)
        flat = self._staged.numpy()
        numbers = flat[: INT64_BYTES * words].view(np.int64)
        self._columns, self._kv_len = numbers[: 3 * count].reshape(3, sequences, rows), numbers[3 * count :]
        self._mask = flat[INT64_BYTES * words :].view(np.bool_).reshape(sequences, rows, width)

    def fill(self, batch: HostBatch) -> None:
        """Copies a batch of at most `rows` rows per sequence to the device, padded by repetitions of its last row. All
        forwards over the previous batch must have finished."""
        count = rows_per_sequence(batch)
        parts = (batch.tokens, batch.positions, batch.slots, batch.mask)
        for to, part in zip((*self._columns, self._mask), parts, strict=True):
            each = part.reshape(len(self._kv_len), count, *part.shape[1:])
            to[:, :count], to[:, count:] = each, each[:, -1:]
        self._kv_len[:] = batch.kv_len
        self._placed.copy_(self._staged, non_blocking=True)


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A captured function, with the output tensors that each replay overwrites."""

    out: Any
    replay: Callable[[], None]
    inputs: GraphInputs | None = None


@dataclass(slots=True)
class _GraphSet:
    """Graphs that are evicted together. `owner`: the object whose tensors they were captured with."""

    owner: Any
    graphs: dict[Hashable, CapturedGraph] = field(default_factory=dict)


class GraphCache:
    """Cache of the CUDA graphs of one model. A function is captured when its key first occurs.

    Graphs belong to graph sets. At most MAX_GRAPH_SETS sets are kept; the least recently used one is evicted with all
    its graphs. All graphs are dropped when the KV cache that they read and write is reallocated (`bind`).
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._graph_sets: dict[Hashable, _GraphSet] = {}
        self._bound: Tensor | None = None

    def bind(self, buffer: Tensor) -> None:
        """Sets the buffer that all graphs read and write. Drops all graphs if it is not the previous one, since they
        hold its address."""
        if self._bound is not buffer:
            self._graph_sets.clear()
            self._bound = buffer

    def open(self, name: Hashable, make: Callable[[], T]) -> T:
        """Marks the graph set `name` as most recently used. If it does not exist, creates it with the object that
        `make` returns, whose tensors its graphs may read and write. Returns the object of the set."""
        graph_set = self._graph_sets.pop(name, None) or _GraphSet(make())
        if len(self._graph_sets) == MAX_GRAPH_SETS:
            del self._graph_sets[next(iter(self._graph_sets))]
        self._graph_sets[name] = graph_set
        return graph_set.owner

    def evict(self, name: Hashable) -> None:
        """Drops the graph set `name`, if it exists."""
        self._graph_sets.pop(name, None)

    def run(self, name: Hashable, key: Hashable, work: Callable[[], Tensor], state: Sequence[Tensor] = ()) -> Tensor:
        """Returns the output of `work`, from a replay of the graph `key` of the graph set `name`. It is valid until the
        next run, since all graphs share their memory. `state`: tensors that `work` changes; they are restored after
        the warm-up runs of a capture."""
        graphs = self._graph_sets[name].graphs
        if key not in graphs:
            before = [tensor.clone() for tensor in state]

            def restore() -> None:
                for tensor, value in zip(state, before, strict=True):
                    tensor.copy_(value)

            graphs[key] = CapturedGraph(*self._capture(work, restore))
        graphs[key].replay()
        return graphs[key].out

    def run_batch(
        self, name: Hashable, batch: HostBatch, work: Callable[[Batch], RowOutputs], device: torch.device,
        shape: Hashable = None,
    ) -> RowOutputs:  # fmt: skip
        """As `run`, for a `work` over a batch of at most CAPTURED_ROWS[-1] rows per sequence. The graph's key is the
        shape of the padded batch, and `shape`, the shape of other inputs of `work`. Returns the outputs [rows, ...] for
        the rows of the first sequence, without padding."""
        graphs = self._graph_sets[name].graphs
        rows, width = padded_rows(rows_per_sequence(batch)), batch.mask.shape[1]
        key = rows, width, shape
        captured = graphs.get(key)
        if captured is None:
            inputs = GraphInputs(rows, width, batch.kv_len.shape[0], device)
            inputs.fill(batch)  # the warm-up runs read it
            captured = graphs[key] = CapturedGraph(*self._capture(lambda: work(inputs.batch)), inputs)
        else:
            assert captured.inputs is not None
            captured.inputs.fill(batch)
        captured.replay()
        (out, hidden), count = captured.out, rows_per_sequence(batch)
        return out[:count], None if hidden is None else hidden[:count]


def rows_per_sequence(batch: HostBatch) -> int:
    """Returns the number of rows of a batch in each of its sequences."""
    return len(batch) // len(batch.kv_len)


def logits_key(sampling: SamplingParams) -> str:
    """Returns a key that is equal for requests whose logits are processed alike, so that one graph, which holds the
    parameters by value, can run all of them."""
    ends = {"prompt_logprobs": None, "max_tokens": None, "stop": (), "stop_token_ids": (), "ignore_eos": False}
    rounds = {"verify_batch": None, "draft_steps": None}
    return repr(replace(sampling, seed=0, negative_prompt_ids=(), **ends, **rounds))


def padded_rows(rows: int) -> int:
    """Returns the smallest of `CAPTURED_ROWS` that is at least `rows`."""
    return next(fixed for fixed in CAPTURED_ROWS if fixed >= rows)


class GraphForwardExecutor(EagerExecutor):
    """Executor whose forwards are CUDA graphs; sampling and acceptance follow operator by operator."""

    name = "graph forwards"
    SUPPORTED: Features = frozenset(FEATURES) - {"guidance", "population"}

    def __init__(self, runner: Runner, graphs: GraphCache, guided: bool = False) -> None:
        """`guided`: whether graphs over two sequences are possible, so that guided requests are supported too."""
        super().__init__(runner)
        self.graphs = graphs
        self._supported = self.SUPPORTED | {"guidance"} if guided else self.SUPPORTED

    def supports(self, required: Features) -> bool:
        return required <= self._supported

    def open(self, request: ExecutorRequest) -> None:
        super().open(request)
        self.graphs.bind(self.runner.cache.kv.k)
        guidance = self.runner.guidance
        self._forwards = FORWARD_GRAPHS if guidance is None else (FORWARD_GRAPHS, guidance.scale)
        self.graphs.open(self._forwards, lambda: None)

    def forward(self, batch: HostBatch) -> Tensor:
        if rows_per_sequence(batch) > CAPTURED_ROWS[-1]:
            return super().forward(batch)
        device, began = self.runner.model.device, time.perf_counter()
        logits = self.run_batch(self._forwards, batch, self.model_forward)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        self.runner.record_step(began, len(batch))
        return logits

    def run_batch(
        self, graph_set: Hashable, batch: HostBatch, work: Callable[[Batch], RowOutputs], shape: Hashable = None
    ) -> Tensor:
        """As `GraphCache.run_batch`, which also returns the hidden states; these are left in `Runner.hidden`."""
        out, self.runner.hidden = self.graphs.run_batch(graph_set, batch, work, self.runner.model.device, shape)
        return out

    def model_forward(self, batch: Batch) -> RowOutputs:
        """Runs the operators of a forward, which a graph captures, and returns the logits and the hidden states. With
        guidance the logits of the conditional and the unconditional row of each token are combined into one."""
        (logits, hidden), guidance = self.runner.model.forward(batch, self.runner.cache), self.runner.guidance
        assert logits is not None
        return logits if guidance is None else guidance.combine(logits), hidden


class StaticNoiseBuffer:
    """Gumbel noise of a block of positions, for all tokens of the vocabulary, in tensors at fixed addresses, which a
    graph reads when it is replayed."""

    def __init__(self, vocab: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self._block = torch.zeros(PositionNoise.BLOCK_POSITIONS, vocab, dtype=dtype, device=device)
        self._first = torch.zeros(1, dtype=torch.int64, device=device)
        self._holds: tuple[PositionNoise, range] | None = None  # noise and positions that the block contains

    def ensure(self, noise: PositionNoise, low: int, end: int) -> None:
        """Loads the noise of the positions `low` to `end - 1` unless the block contains it. They must fit one block
        (PositionNoise.BLOCK_POSITIONS)."""
        if self._holds is not None and self._holds[0] is noise:
            held = self._holds[1]
            if held.start <= low and end <= held.stop:
                return
        span = range(low, low + len(self._block))
        assert end <= span.stop
        self._block.copy_(noise.generate(span, range(self._block.shape[1]), self._block.dtype))
        self._first.fill_(low)
        self._holds = noise, span

    def rows(self, positions: Tensor, tokens: range, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As `PositionNoise.rows`, without a device synchronisation. Positions outside the block get arbitrary noise:
        call `ensure` before a graph is replayed."""
        assert dtype == self._block.dtype
        rows = (positions - self._first).clamp_(0, len(self._block) - 1)
        return self._block[:, tokens.start : tokens.stop], rows


class CudaCapture:
    """A `Capture` on the current CUDA device. Its graphs share one memory pool, since they never run concurrently.

    `lock`: serialises the captures of two threads. During a capture the other thread may launch kernels and wait for
    its own stream.
    `priority`: CUDA priority of the graphs' kernels on whatever stream they are replayed; lower values are scheduled
    first.
    """

    def __init__(self, lock: Lock, priority: int = 0) -> None:
        self._pool, self._lock = torch.cuda.graph_pool_handle(), lock
        # a stream of its own: libraries keep separate state for it, which the warm-up runs allocate before the capture
        self._stream = torch.cuda.Stream(priority=priority)
        self._first: torch.cuda.CUDAGraph | None = (
            None  # keeps the pool alive: a pool without graphs cannot be used again
        )

    def __call__(
        self, work: Callable[[], T], restore: Callable[[], None] = _nothing, /
    ) -> tuple[T, Callable[[], None]]:
        side, current = self._stream, torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        with self._lock:
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(WARM_UP_RUNS):
                    work()
                    restore()
            current.wait_stream(side)
            with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                self._first = self._first or graph
                out = work()
        return out, graph.replay
