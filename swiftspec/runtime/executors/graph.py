"""Functions captured as CUDA graphs and replayed: the only user of CUDA graphs. Here also the steps of which forwards
are graphs, and a population's rounds as graphs.

A graph reads and writes tensors that stay where they are; what it holds by value is its key. A forward's shape is a
number of rows in each sequence, padded to a few, and a width of the mask window, which tree/mask.py has padded already.
Rows that pad repeat the last one: they write the same keys and values to the same slots, and nobody reads their logits.
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

T = TypeVar("T")

CAPTURED_ROWS = (1, 2, 4, 8, 16, 32)  # of a sequence; batches of more are not captured
MAX_FAMILIES = 5  # of graphs that are kept: forwards, and four ways in which requests shaped logits
WARM_UP_RUNS = 2  # runs before a capture: what is set up or tuned on first use must not be captured
INT64_BYTES = 8  # bytes of an int64
FORWARD_FAMILY, ROUND_FAMILY = "forwards", "rounds"  # families: a model's forwards alone, a population's rounds


def _nothing() -> None:
    """There is nothing to put back."""


class Capture(Protocol):
    """Records `work`. The second result runs it on what its inputs then hold, into the first. `restore` puts back what
    a run of `work` has changed; it is called after each."""

    def __call__(
        self, work: Callable[[], Tensor], restore: Callable[[], None] = _nothing, /
    ) -> tuple[Tensor, Callable[[], None]]: ...


class GraphInputs:
    """One shape's batch on the device, its parts in one buffer, so that one copy fills it. `rows`: of each sequence."""

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
        """Puts a batch of no more rows than these on the device, which must have taken the one before."""
        count = rows_per_sequence(batch)
        parts = (batch.tokens, batch.positions, batch.slots, batch.mask)
        for to, part in zip((*self._columns, self._mask), parts, strict=True):
            each = part.reshape(len(self._kv_len), count, *part.shape[1:])
            to[:, :count], to[:, count:] = each, each[:, -1:]
        self._kv_len[:] = batch.kv_len
        self._placed.copy_(self._staged, non_blocking=True)


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A function that has been captured."""

    out: Tensor
    replay: Callable[[], None]
    inputs: GraphInputs | None = None


@dataclass(slots=True)
class _Family:
    """Graphs that belong together, and what they were captured with."""

    owner: Any
    graphs: dict[Hashable, CapturedGraph] = field(default_factory=dict)


class GraphCache:
    """The graphs of one model. A function is captured when its key first comes.

    Keys come in families. A few families are kept, and the one that rested longest goes with all its graphs. All go
    when the buffer that they read and write is another one.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._families: dict[Hashable, _Family] = {}
        self._bound: Tensor | None = None

    def bind(self, buffer: Tensor) -> None:
        """Says which buffer the graphs know by its address."""
        if self._bound is not buffer:
            self._families.clear()
            self._bound = buffer

    def open(self, name: Hashable, make: Callable[[], T]) -> T:
        """What a family's graphs are captured with, made when the family first comes, and kept as long as they are."""
        family = self._families.pop(name, None) or _Family(make())
        if len(self._families) == MAX_FAMILIES:
            del self._families[next(iter(self._families))]
        self._families[name] = family
        return family.owner

    def evict(self, name: Hashable) -> None:
        """Lets go of a family."""
        self._families.pop(name, None)

    def run(self, name: Hashable, key: Hashable, work: Callable[[], Tensor], state: Sequence[Tensor] = ()) -> Tensor:
        """What `work` returns, to be read before the next run: graphs share their memory. `state`: what it changes and
        a run before the capture must leave as it was."""
        graphs = self._families[name].graphs
        if key not in graphs:
            before = [tensor.clone() for tensor in state]

            def restore() -> None:
                for tensor, value in zip(state, before, strict=True):
                    tensor.copy_(value)

            graphs[key] = CapturedGraph(*self._capture(work, restore))
        graphs[key].replay()
        return graphs[key].out

    def run_batch(
        self, name: Hashable, batch: HostBatch, work: Callable[[Batch], Tensor], device: torch.device,
        shape: Hashable = None,
    ) -> Tensor:  # fmt: skip
        """What `work` gives for each row of a batch of at most ROWS[-1] rows in a sequence, [n, ...] on the device.
        `shape`: that of what it reads besides."""
        graphs = self._families[name].graphs
        rows, width = padded_rows(rows_per_sequence(batch)), batch.mask.shape[1]
        key = rows, width, shape
        captured = graphs.get(key)
        if captured is None:
            inputs = GraphInputs(rows, width, batch.kv_len.shape[0], device)
            inputs.fill(batch)  # the runs before the capture are on it
            captured = graphs[key] = CapturedGraph(*self._capture(lambda: work(inputs.batch)), inputs)
        else:
            assert captured.inputs is not None
            captured.inputs.fill(batch)
        captured.replay()
        return captured.out[: rows_per_sequence(batch)]


def rows_per_sequence(batch: HostBatch) -> int:
    """The rows of each of its sequences."""
    return len(batch) // len(batch.kv_len)


def logits_key(sampling: SamplingParams) -> str:
    """Equal for two requests whose logits are shaped alike: a graph that has these parameters by value serves both."""
    ends = {"prompt_logprobs": None, "max_tokens": None, "stop": (), "stop_token_ids": (), "ignore_eos": False}
    rounds = {"verify_batch": None, "draft_steps": None}
    return repr(replace(sampling, seed=0, negative_prompt_ids=(), **ends, **rounds))


def padded_rows(rows: int) -> int:
    """How many rows a batch of so many is captured with."""
    return next(fixed for fixed in CAPTURED_ROWS if fixed >= rows)


class GraphForwardExecutor(EagerExecutor):
    """Eager steps whose forwards are graphs; what makes tokens of their logits follows operator by operator."""

    name = "graph forwards"
    TAKES: Features = frozenset(FEATURES) - {"guidance", "population"}

    def __init__(self, runner: Runner, graphs: GraphCache, guided: bool = False) -> None:
        """`guided`: whether a graph may hold two sequences, so that it takes guided requests, too."""
        super().__init__(runner)
        self.graphs = graphs
        self._takes = self.TAKES | {"guidance"} if guided else self.TAKES

    def supports(self, required: Features) -> bool:
        return required <= self._takes

    def open(self, request: ExecutorRequest) -> None:
        super().open(request)
        self.graphs.bind(self.runner.cache.k)
        guidance = self.runner.guidance
        self._forwards = FORWARD_FAMILY if guidance is None else (FORWARD_FAMILY, guidance.scale)
        self.graphs.open(self._forwards, lambda: None)

    def forward(self, batch: HostBatch) -> Tensor:
        if rows_per_sequence(batch) > CAPTURED_ROWS[-1]:
            return super().forward(batch)
        device, began = self.runner.model.device, time.perf_counter()
        logits = self.graphs.run_batch(self._forwards, batch, self.model_forward, device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        self.runner.record_step(began, len(batch))
        return logits

    def model_forward(self, batch: Batch) -> Tensor:
        """Logits of a batch on the device, as a graph holds it; guided, of each pair of rows one."""
        logits, guidance = self.runner.model.forward(batch, self.runner.cache), self.runner.guidance
        assert logits is not None
        return logits if guidance is None else guidance.combine(logits)


class CudaCapture:
    """Captures on the current CUDA device. Its graphs share one pool, for they run one after the other.

    Captures of two threads take turns, by `lock`; meanwhile the other thread may launch, and wait for its own stream.
    `priority`: of the graphs' kernels, whatever the stream on which they are replayed; below 0 they go first.
    """

    def __init__(self, lock: Lock, priority: int = 0) -> None:
        self._pool, self._lock = torch.cuda.graph_pool_handle(), lock
        # its own, for what a library keeps by stream is then nobody else's, and there before a capture begins
        self._stream = torch.cuda.Stream(priority=priority)
        self._first: torch.cuda.CUDAGraph | None = None  # kept: a pool that was without graphs takes no more of them

    def __call__(
        self, work: Callable[[], Tensor], restore: Callable[[], None] = _nothing, /
    ) -> tuple[Tensor, Callable[[], None]]:
        side, here = self._stream, torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        with self._lock:
            side.wait_stream(here)
            with torch.cuda.stream(side):
                for _ in range(WARM_UP_RUNS):
                    work()
                    restore()
            here.wait_stream(side)
            with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                self._first = self._first or graph
                out = work()
        return out, graph.replay
