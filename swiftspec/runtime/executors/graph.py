"""CUDA graphs: capture and replay, the noise that graphs read, and the executor whose forwards are graphs.

All calls of torch's CUDA graph API are in this module.

A graph reads and writes tensors at fixed addresses. Its key contains shapes only: the parameters of a request are in
tensors (sampling/logits_params.py). The shape of a forward is the number of rows per block (`HostBatch.blocks`), padded
to a power of two, the width of the mask window, which tree/mask.py has already padded, and the number of slots that
attention reads, if the backend fixes it (`capture_bucket`). Padding rows repeat the last row: they write the same KV to
the same slots, and their logits are unused.

The sequence of each row is an input, too. Concurrent requests therefore share the graphs of a model: a joint forward
(runtime/sequence_runner.py) is a batch with the rows of several, and the graphs of one request read its parameters from
tensors that the next request overwrites (`GraphForwardExecutor.load_request`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakSet, ref

import numpy as np
import torch
from torch import Tensor

from swiftspec.cache.model_cache import ModelCache
from swiftspec.model.batch import Batch, HostBatch
from swiftspec.runtime.executors import ExecutorRequest
from swiftspec.runtime.executors.eager import EagerExecutor
from swiftspec.runtime.runner import Runner
from swiftspec.sampling.guidance import guided_logits
from swiftspec.sampling.noise import PositionNoise
from swiftspec.sampling.sampler import Sampler
from swiftspec.tree.mask import padded_width

T = TypeVar("T")
RowOutputs = tuple[Tensor, Tensor | None]  # a tensor with one row per row of a batch, such as logits; hidden states

CAPTURED_ROWS = (1, 2, 4, 8, 16, 32)  # rows per block of captured batches of a request; larger ones run eagerly
MAX_JOINT_ROWS = 256  # of a captured forward of several requests; larger ones run eagerly
WARM_UP_RUNS = 2  # runs before a capture, since one-time set-up and tuning must not be captured
INT64_BYTES = 8
MAX_AHEAD_SLOTS = 4096  # longer contexts capture on first use with backends whose graphs hold the number of slots
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
    """The input batch of a captured forward, in one device buffer, so that one copy fills it."""

    def __init__(self, key: BatchKey, sequences: int, device: torch.device) -> None:
        """`key`: of the graph. `sequences`: sequences in the KV cache."""
        rows, width = key.rows, key.width
        count = rows * key.blocks
        words = 4 * count + sequences
        size = INT64_BYTES * words + count * width
        self._staged = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._placed = torch.empty(size, dtype=torch.uint8, device=device)
        tokens, positions, slots, sequence, kv_len = (
            self._placed[: INT64_BYTES * words].view(torch.int64).split((*[count] * 4, sequences))
        )
        mask = self._placed[INT64_BYTES * words :].view(torch.bool).view(count, width)
        self.batch = Batch(
            tokens=tokens,
            positions=positions,
            slots=slots,
            mask=mask,
            sequence=sequence,
            kv_len=kv_len,
            max_kv_len=key.bucket,
            blocks=key.blocks,
        )
        flat = self._staged.numpy()
        numbers = flat[: INT64_BYTES * words].view(np.int64)
        self._columns, self._kv_len = numbers[: 4 * count].reshape(4, key.blocks, rows), numbers[4 * count :]
        self._mask = flat[INT64_BYTES * words :].view(np.bool_).reshape(key.blocks, rows, width)

    def fill(self, batch: HostBatch) -> None:
        """Copies a batch with as many blocks, of at most as many rows, and a mask of at most as many slots to the
        device, padded by repetitions of the last row of each block and, on the left, by slots that every row attends
        to. All forwards over the previous batch must have finished."""
        count, width = batch.rows_per_block, batch.mask.shape[1]
        self._mask[..., :-width] = True
        parts = (batch.tokens, batch.positions, batch.slots, batch.sequence, batch.mask)
        for to, part in zip((*self._columns, self._mask[..., -width:]), parts, strict=True):
            each = part.reshape(batch.blocks, count, *part.shape[1:])
            to[:, :count], to[:, count:] = each, each[:, -1:]
        self._kv_len[:] = batch.kv_len
        self._placed.copy_(self._staged, non_blocking=True)


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A captured function, with the output tensors that each replay overwrites."""

    out: Any
    replay: Callable[[], None]
    inputs: GraphInputs | None = None


class BatchShape(NamedTuple):
    """Shape of a captured batch of one block: rows, and width of the mask window."""

    rows: int
    width: int


class BatchKey(NamedTuple):
    """Key of a captured forward: rows per block, width of the mask window, the shape of further inputs, the
    `capture_bucket` of the backend, and the number of blocks."""

    rows: int
    width: int
    shape: Hashable = None
    bucket: int | None = None
    blocks: int = 1


class GraphCache:
    """Cache of the CUDA graphs of one model, in named graph sets. A function is captured when its key first occurs,
    unless a graph that can run it has been captured ahead. The executors of all requests share the graphs, and what
    these read (`shared`).

    All graphs are dropped when the KV cache that they read and write is reallocated (`bind`). `captures`, `replays`:
    number of graphs captured, and of batches run by a replay, so far. `loaded`: request whose parameters the graphs
    read.
    """

    def __init__(
        self, capture: Capture, capture_bucket: Callable[[int | None], int | None] = lambda max_kv_len: None
    ) -> None:
        """`capture_bucket`: that of the model's backend, see `RunnerOps`."""
        self._capture, self._capture_bucket = capture, capture_bucket
        self._graph_sets: dict[Hashable, dict[Hashable, CapturedGraph]] = {}
        self._complete: set[Hashable] = set()  # graph sets whose graphs were captured ahead
        self._bound: ref[Tensor] | None = None  # weak, so that a reallocated KV cache frees its old buffer first
        self._shared: dict[str, Any] = {}
        self.captures = self.replays = 0
        self.loaded: ExecutorRequest | None = None

    def shared(self, name: str, make: Callable[[], T]) -> T:
        """Returns what the graphs of all requests read under this name; calls `make` when it is first needed."""
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]

    def bind(self, buffer: Tensor) -> None:
        """Sets the buffer that all graphs read and write. Drops all graphs if it is not the previous one, since they
        hold its address."""
        if self._bound is None or self._bound() is not buffer:
            self._graph_sets.clear()
            self._complete.clear()
            self._bound = ref(buffer)

    def evict(self, name: Hashable) -> None:
        """Drops the graph set `name`, if it exists."""
        self._graph_sets.pop(name, None)

    def mark_complete(self, name: Hashable) -> None:
        """Declares that the graph set `name` contains graphs for all shapes: a smaller batch than the captured ones is
        padded from now on, and not captured."""
        self._complete.add(name)

    def ensure(
        self,
        name: Hashable,
        key: Hashable,
        work: Callable[[], Any],
        state: Sequence[Tensor] = (),
        inputs: GraphInputs | None = None,
    ) -> CapturedGraph:
        """Returns the graph `key` of the graph set `name`, whose replay runs `work`. Its output is valid until the next
        replay of any graph, since all graphs share their memory. Captures the graph if it does not exist.

        `state`: tensors that `work` changes; they are restored after the warm-up runs of the capture.
        `inputs`: the batch that `work` reads.
        """
        graphs = self._graph_sets.setdefault(name, {})
        if key not in graphs:
            before = [tensor.clone() for tensor in state]

            def restore() -> None:
                for tensor, value in zip(state, before, strict=True):
                    tensor.copy_(value)

            graphs[key] = CapturedGraph(*self._capture(work, restore), inputs)
            self.captures += 1
        return graphs[key]

    def run_batch(
        self,
        name: Hashable,
        batch: HostBatch,
        work: Callable[[Batch], RowOutputs],
        device: torch.device,
        shape: Hashable = None,
    ) -> RowOutputs:
        """Returns the outputs of a `work` over a batch from a replay of its graph: [rows, ...] for the rows of the
        first block, without padding. `shape`: the shape of other inputs of `work`."""
        key, count = self.batch_key(name, batch, shape), batch.rows_per_block
        captured = self._graph_sets.setdefault(name, {}).get(key)
        if captured is None:
            inputs = GraphInputs(key, batch.kv_len.shape[0], device)
            inputs.fill(batch)  # the warm-up runs read it
            captured = self.ensure(name, key, lambda: work(inputs.batch), inputs=inputs)
        else:
            assert captured.inputs is not None
            captured.inputs.fill(batch)
        captured.replay()
        self.replays += 1
        out, hidden = captured.out
        return out[:count], None if hidden is None else hidden[:count]

    def batch_key(self, name: Hashable, batch: HostBatch, shape: Hashable = None) -> BatchKey:
        """Returns the key of the graph that runs a batch: the smallest one that was captured ahead and is large enough,
        or one of the batch's own size."""
        bucket = self._capture_bucket(batch.max_kv_len)
        own = BatchKey(padded_rows(batch.rows_per_block), batch.mask.shape[1], shape, bucket, batch.blocks)
        graphs = self._graph_sets.get(name, {})
        if own in graphs or name not in self._complete:
            return own
        larger = [
            key
            for key in graphs
            if isinstance(key, BatchKey)
            and (key.shape, key.bucket, key.blocks) == (shape, bucket, batch.blocks)
            and key.rows >= own.rows
            and key.width >= own.width
        ]
        return min(larger, default=own, key=lambda key: (key.rows, key.width))


def chain_shapes(most: int) -> list[BatchShape]:
    """Returns the shapes of captured batches of up to `most` rows that attend to each other only: verifications, and
    chains of tokens."""
    rows = [rows for rows in CAPTURED_ROWS if rows <= padded_rows(min(most, CAPTURED_ROWS[-1]))]
    return [BatchShape(count, padded_width(count)) for count in rows]


def tree_shapes(rows: int, slots: int) -> list[BatchShape]:
    """Returns the shapes of captured batches of up to `rows` rows of a tree of up to `slots` slots."""
    widths = {padded_width(width) for width in range(1, slots + 1)}
    return [BatchShape(padded_rows(rows), width) for width in sorted(widths)] if rows <= CAPTURED_ROWS[-1] else []


def joint_shapes(requests: int, rows: int, shapes: Sequence[BatchShape]) -> list[BatchShape]:
    """Returns the shapes of captured joint forwards of up to `requests` requests with up to `rows` rows each. `shapes`:
    those of the forwards of a single request."""
    most = min(padded_rows(requests * rows), MAX_JOINT_ROWS)
    widths = sorted({shape.width for shape in shapes})
    further = padded_rows(rows) * 2 if requests > 1 else most + 1
    counts = [1 << bit for bit in range(most.bit_length()) if further <= 1 << bit]
    return [BatchShape(count, width) for count in counts for width in widths]


def load_bias(buffer: Tensor, sampler: Sampler) -> None:
    """Copies the bias of a request to the buffer [vocab] that graphs read."""
    if sampler.bias is None:
        buffer.zero_()
    else:
        buffer.copy_(sampler.bias)


def blank_batch(cache: ModelCache, shape: BatchShape, kv_len: int = 0) -> HostBatch:
    """Returns a batch of the first sequence of a cache to capture a forward with: rows in an empty cache, with `kv_len`
    slots in use, or as many as there are rows."""
    rows, lengths = shape.rows, np.zeros(len(cache.buffer_kv_len()), np.int64)
    kv_len = lengths[0] = max(rows, kv_len)
    slots, zeros = np.arange(kv_len - rows, kv_len), np.zeros(rows, np.int64)
    return HostBatch(zeros, slots, slots, np.ones(shape, np.bool_), zeros, lengths)


def padded_rows(rows: int) -> int:
    """Returns the smallest power of two that is at least `rows`."""
    return 1 << (rows - 1).bit_length()


class GraphForwardExecutor(EagerExecutor):
    """Executor whose forwards are CUDA graphs; sampling and acceptance follow operator by operator."""

    name = "graph forwards"

    def __init__(
        self, runner: Runner, graphs: GraphCache, guided: bool = True, max_rows: int = CAPTURED_ROWS[-1]
    ) -> None:
        """`guided`: whether graphs over two sequences are possible, so that guided requests are supported too.
        `max_rows`: rows per block of the largest batch that runs as a graph."""
        super().__init__(runner)
        self.graphs, self.max_rows = graphs, max_rows
        self.columns = (*self.columns, *(() if guided else ("graph of one sequence",)))
        # guidance scale s, read by graphs over two sequences
        self._scale = graphs.shared("scale", lambda: torch.ones((), dtype=torch.float64, device=self._device))

    def open(self, request: ExecutorRequest) -> None:
        super().open(request)
        self.graphs.bind(self.runner.cache.kv.k)

    def load_request(self) -> None:
        """Copies the parameters of the request to the tensors that graphs read, unless these hold them already: another
        request may have run since."""
        if self.graphs.loaded is not self._request:
            self.load_parameters(self._request)
            self.graphs.loaded = self._request

    def load_parameters(self, request: ExecutorRequest) -> None:
        """Copies the parameters of a request to the tensors that graphs read."""
        if self.runner.guidance is not None:
            self._scale.fill_(self.runner.guidance.scale)

    def forward_captures(self, shapes: Sequence[BatchShape]) -> list[Callable[[], None]]:
        """Returns functions that each capture a forward over a batch of one of these shapes, for requests without
        guidance. They must be called in this order, without an open request, and on all ranks of a group."""

        lengths = self.captured_lengths()

        def capture(shape: BatchShape, kv_len: int) -> None:
            self.open_cache()
            self.capture_batch(FORWARD_GRAPHS, shape, kv_len, self.model_forward)
            if (shape, kv_len) == (shapes[-1], lengths[-1]):
                self.graphs.mark_complete(FORWARD_GRAPHS)

        return [partial(capture, shape, kv_len) for kv_len in lengths for shape in shapes]

    def captured_lengths(self) -> list[int]:
        """Returns the numbers of slots in use for which forwards are captured ahead, one for each `capture_bucket` of
        contexts of up to MAX_AHEAD_SLOTS. 0: the backend has one for all."""
        lengths: dict[int | None, int] = {}
        for power in range(MAX_AHEAD_SLOTS.bit_length()):
            length = min(1 << power, self.runner.cache.capacity)
            bucket = self.runner.ops.capture_bucket(length)
            lengths[bucket] = 0 if bucket is None else length
        return [*lengths.values()]

    def open_cache(self) -> None:
        """Prepares the KV cache for captures without a request."""
        self.runner.cache.reset(1)
        self.runner.guidance = None
        self.graphs.bind(self.runner.cache.kv.k)

    def capture_batch(
        self, graph_set: Hashable, shape: BatchShape, kv_len: int, work: Callable[[Batch], RowOutputs]
    ) -> None:
        """Captures the graph of a batch of this shape. `kv_len`: slots in use."""
        self.graphs.run_batch(graph_set, blank_batch(self.runner.cache, shape, kv_len), work, self._device)

    def forward(self, batch: HostBatch) -> Tensor:
        if self.runner.in_company or batch.rows_per_block > self.max_rows:
            return super().forward(batch)
        began = time.perf_counter()
        if self.runner.guidance is not None:
            self.load_request()
        logits = self.run_batch(FORWARD_GRAPHS, batch, self.model_forward)
        self._complete(began, len(batch))
        return logits

    def _complete(self, began: float, rows: int) -> None:
        """Waits for a forward with this number of rows, and records its duration."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self.runner.record_step(began, rows)

    def run_batch(
        self, graph_set: Hashable, batch: HostBatch, work: Callable[[Batch], RowOutputs], shape: Hashable = None
    ) -> Tensor:
        """As `GraphCache.run_batch`, which also returns the hidden states; these are left in `Runner.hidden`."""
        out, self.runner.hidden = self.graphs.run_batch(graph_set, batch, work, self._device, shape)
        return out

    @property
    def _device(self) -> torch.device:
        return self.runner.model.device

    def model_forward(self, batch: Batch) -> RowOutputs:
        """Runs the operators of a forward, which a graph captures, and returns the logits and the hidden states. With
        guidance the logits of the conditional and the unconditional row of each token are combined into one."""
        logits, hidden = self.runner.model.forward(batch, self.runner.cache)
        assert logits is not None
        return logits if batch.blocks == 1 else guided_logits(logits, self._scale), hidden


class JointGraphExecutor(GraphForwardExecutor):
    """Executor of the forwards of concurrent requests as CUDA graphs. `forward` does not wait for the device, so that
    the requests launch their sampling meanwhile; reading the results does."""

    _launched: tuple[float, int] | None = None  # start and rows of a forward that was not waited for

    def forward(self, batch: HostBatch) -> Tensor:
        self.finish()  # the inputs of the last forward are overwritten
        return super().forward(batch)

    def _complete(self, began: float, rows: int) -> None:
        self._launched = began, rows

    def finish(self) -> None:
        if self._launched is not None:
            super()._complete(*self._launched)
            self._launched = None


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
    """A `Capture` on a CUDA device. Its graphs share one memory pool, since they never run concurrently.

    `lock`: serialises the captures of two threads. During a capture the other thread may launch kernels and wait for
    its own stream.
    `device`: the device of the captured work, with an index. It must be the current device of each thread that
    captures, since torch captures on the current device and would leave the work of another one out of the graph.
    `priority`: CUDA priority of the graphs' kernels on whatever stream they are replayed; lower values are scheduled
    first.
    """

    def __init__(self, lock: Lock, device: torch.device, priority: int = 0) -> None:
        self._pool, self._lock, self._device = torch.cuda.graph_pool_handle(), lock, device
        # a stream of its own: libraries keep separate state for it, which the warm-up runs allocate before the capture
        self._stream = torch.cuda.Stream(device, priority)
        self._graphs = WeakSet[torch.cuda.CUDAGraph]()  # those in use
        self._first: torch.cuda.CUDAGraph | None = (
            None  # keeps the pool alive: a pool without graphs cannot be used again
        )

    def __call__(
        self, work: Callable[[], T], restore: Callable[[], None] = _nothing, /
    ) -> tuple[T, Callable[[], None]]:
        if torch.cuda.current_device() != self._device.index:
            raise RuntimeError(f"a capture on {self._device}, but GPU {torch.cuda.current_device()} is current")
        side, current = self._stream, torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        with self._lock:
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(WARM_UP_RUNS):
                    work()
                    restore()
            current.wait_stream(side)
            with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                out = work()
            self._graphs.add(graph)
            self._first = self._first or graph  # only now: a graph whose capture failed keeps no pool alive
        return out, graph.replay

    def release(self) -> None:
        """Frees all graphs; none can be replayed any more. A graph refers to the communicator whose collectives it
        contains, and NCCL destroys a communicator only after all such graphs have been freed. All replays must have
        finished."""
        with self._lock:
            self._first = None
            for graph in list(self._graphs):
                graph.reset()
            self._graphs.clear()
