"""Forwards and whole rounds captured as CUDA graphs and replayed: the only user of CUDA graphs.

A forward's shape is a number of rows, padded to a few, and a width of the mask window, which tree/mask.py has padded
already. Added rows repeat the last one: they write the same keys and values to the same slots, and nobody reads their
logits. The cache, the weights and the epochs of a group's protocol stay where they are, so a graph reads them as they
are then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.model.batch import Batch

Ints = NDArray[np.int64]

ROWS = (1, 2, 4, 8, 16, 32)  # more rows than that are not captured
WARM_UPS = 2  # forwards before a capture: what is set up or tuned on first use must not be captured
WORD = 8  # bytes of an int64


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A Batch before it is on the device. One that is captured is of sequence 0."""

    tokens: Ints  # [n]
    positions: Ints  # [n]
    slots: Ints  # [n]
    mask: NDArray[np.bool_]  # [n, W]
    sequence: Ints  # [n]
    kv_len: Ints  # [S]

    def to(self, device: torch.device) -> Batch:
        """Its tensors, one by one: what is not captured need not be fast."""
        parts = (self.tokens, self.positions, self.slots, self.mask, self.sequence, self.kv_len)
        return Batch(*(torch.from_numpy(part).to(device) for part in parts))


def _nothing() -> None:
    """There is nothing to put back."""


class Capture(Protocol):
    """Records `forward`. The second result runs it on what its inputs then hold, into the first. `restore` puts back
    what a run of `forward` has changed; it is called after each."""

    def __call__(
        self, forward: Callable[[], Tensor], restore: Callable[[], None] = _nothing, /
    ) -> tuple[Tensor, Callable[[], None]]: ...


class Inputs:
    """One shape's batch on the device, its parts in one buffer, so that one copy fills it."""

    def __init__(self, rows: int, width: int, sequences: int, device: torch.device) -> None:
        words = 3 * rows + sequences
        size = WORD * words + rows * width
        self._staged = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._placed = torch.empty(size, dtype=torch.uint8, device=device)
        tokens, positions, slots, kv_len = (
            self._placed[: WORD * words].view(torch.int64).split((*[rows] * 3, sequences))
        )
        mask = self._placed[WORD * words :].view(torch.bool).view(rows, width)
        self.batch = Batch(tokens, positions, slots, mask, torch.zeros_like(tokens), kv_len)
        flat = self._staged.numpy()
        numbers = flat[: WORD * words].view(np.int64)
        self._columns, self._kv_len = numbers[: 3 * rows].reshape(3, rows), numbers[3 * rows :]
        self._mask = flat[WORD * words :].view(np.bool_).reshape(rows, width)

    def fill(self, batch: HostBatch) -> None:
        """Puts a batch of no more rows than these on the device, which must have taken the one before."""
        count = batch.mask.shape[0]
        for part, column in zip(self._columns, (batch.tokens, batch.positions, batch.slots), strict=True):
            part[:count], part[count:] = column, column[-1]
        self._mask[:count], self._mask[count:] = batch.mask, batch.mask[-1]
        self._kv_len[:] = batch.kv_len
        self._placed.copy_(self._staged, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Captured:
    """A shape that has been captured."""

    inputs: Inputs
    out: Tensor  # [rows, ...]
    replay: Callable[[], None]


class Graphs:
    """The graphs of one model and cache. A shape is captured when it first comes."""

    def __init__(self, forward: Callable[[Batch], Tensor], device: torch.device, capture: Capture) -> None:
        """`forward` gives something of each row; but for the batch it reads only what stays where it is."""
        self._forward, self._device, self._capture = forward, device, capture
        self._captured: dict[tuple[int, int], Captured] = {}

    @staticmethod
    def take(rows: int) -> bool:
        """Whether forwards of so many rows are captured."""
        return rows <= ROWS[-1]

    @staticmethod
    def padded(rows: int) -> int:
        """How many rows a batch of so many is captured with."""
        return next(fixed for fixed in ROWS if fixed >= rows)

    def forget(self) -> None:
        """Lets go of all captures."""
        self._captured.clear()

    def __call__(self, batch: HostBatch) -> Tensor:
        """What `forward` gives, [n, ...] on the device, to be read before the next call: graphs share their memory."""
        count, width = batch.mask.shape
        rows = self.padded(count)
        captured = self._captured.get((rows, width))
        if captured is None:
            inputs = Inputs(rows, width, batch.kv_len.shape[0], self._device)
            inputs.fill(batch)  # the forwards before the capture run on it
            captured = Captured(inputs, *self._capture(lambda: self._forward(inputs.batch)))
            self._captured[rows, width] = captured
        else:
            captured.inputs.fill(batch)
        captured.replay()
        return captured.out[:count]


class Rounds:
    """Rounds of one shape for each width of the window, which read and write only tensors that stay where they are.
    A width is captured when it first comes."""

    def __init__(self, round_: Callable[[int], Tensor], state: Sequence[Tensor], capture: Capture) -> None:
        """`state`: what a round changes, but for keys and values, of which the next one writes the same anew."""
        self._round, self._state, self._capture = round_, state, capture
        self._captured: dict[int, tuple[Tensor, Callable[[], None]]] = {}

    def __call__(self, width: int) -> Tensor:
        """What the round returns, to be read before the next."""
        if width not in self._captured:
            before = [tensor.clone() for tensor in self._state]

            def restore() -> None:
                for tensor, value in zip(self._state, before, strict=True):
                    tensor.copy_(value)

            self._captured[width] = self._capture(lambda: self._round(width), restore)
        out, replay = self._captured[width]
        replay()
        return out

    def forget(self) -> None:
        """For rounds that are not as they were."""
        self._captured.clear()


class CudaCapture:
    """Captures on the current CUDA device. Its graphs share one pool, for they run one after the other.

    Captures of two threads take turns, by `turn`; meanwhile the other thread may launch, and wait for its own stream.
    """

    def __init__(self, turn: Lock) -> None:
        self._pool, self._turn = torch.cuda.graph_pool_handle(), turn
        # its own, for what a library keeps by stream is then nobody else's, and there before a capture begins
        self._stream = torch.cuda.Stream()
        self._first: torch.cuda.CUDAGraph | None = None  # kept: a pool that was without graphs takes no more of them

    def __call__(
        self, forward: Callable[[], Tensor], restore: Callable[[], None] = _nothing, /
    ) -> tuple[Tensor, Callable[[], None]]:
        side, here = self._stream, torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        with self._turn:
            side.wait_stream(here)
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    forward()
                    restore()
            here.wait_stream(side)
            with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                self._first = self._first or graph
                logits = forward()
        return logits, graph.replay
