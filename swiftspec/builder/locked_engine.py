"""A thread-safe engine: one request, or one batch of requests, at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from swiftspec.backends.cuda.devices import is_device_error, is_out_of_gpu_memory
from swiftspec.batching.batch_request import BatchRequest, IsCancelled, NextRequest
from swiftspec.batching.tree_batch import TreeBatchDecoding
from swiftspec.engine import Decoding, Engine, RequestLimits, Stats, TokenChunk, request_start
from swiftspec.errors import NonFiniteLogits, UserError, truncated_repr
from swiftspec.params import SamplingParams
from swiftspec.runtime.cancellation import CancelCheck, Cancelled
from swiftspec.runtime.current_device import on_device
from swiftspec.settings_schema import coerce, require
from swiftspec.smc.decoding import PopulationDecoding

Piece = TypeVar("Piece")
CPU = torch.device("cpu")
CLOSED = "this engine is closed: create a new one"
OUT_OF_MEMORY = "not enough memory for this request: use a smaller max_model_len, or disable guidance"


class BackgroundWork(Protocol):
    """Work that competes with requests for the CPU or GPU and can be paused."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class LockedEngine(Engine):
    """A thread-safe engine that serves one thread at a time: while a request of one thread is open, calls of other
    threads raise UserError.

    An open stream belongs to the thread that last requested a chunk; that thread may start another request, which ends
    the open one. After `close` every call raises UserError.
    """

    def __init__(
        self,
        decoding: Decoding,
        limits: RequestLimits,
        background: BackgroundWork | None = None,
        cancel_check: CancelCheck | None = None,
        on_finished: Callable[[Stats], object] = lambda stats: None,
        device: torch.device = CPU,
        on_device_error: Callable[[Exception], object] = lambda error: None,
    ) -> None:
        """`background`: work that is paused while a request runs.
        `cancel_check`: the check that the runners of `decoding` call before each prefill chunk.
        `on_finished`: called with the statistics of each request when it ends.
        `device`: device of the models, which becomes the current one of whatever thread decodes, while it does.
        `on_device_error`: called with an error of this process's GPU (`is_device_error`) before it is raised.
        """
        super().__init__(decoding, limits)
        self._background, self._cancel_check = background, cancel_check if cancel_check is not None else CancelCheck()
        self._on_finished, self._device, self._on_device_error = on_finished, device, on_device_error
        self._lock = threading.RLock()  # held during a round
        self._open: tuple[Generator[Any], int] | None = None  # the running request and its thread
        self._closed = False

    def stream(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Generator[TokenChunk]:
        """Streams a request as `Engine.stream` does. Token ids may be NumPy or torch integers. `cancelled` is called
        before each prefill chunk, on the thread that reads the stream; if it returns True, the stream ends without
        yielding anything."""
        sampling = sampling if sampling is not None else SamplingParams()
        require(
            isinstance(sampling, SamplingParams), f"sampling must be SamplingParams, not {truncated_repr(sampling)}"
        )
        with self._engine_lock():
            return self._rounds(super().stream(token_ids(prompt), sampling), cancelled)

    def request(self, number: int, prompt: Sequence[int], sampling: SamplingParams) -> BatchRequest:
        """Returns a request for `run_batch`. `number`: the caller's identifier of the request. Raises UserError if the
        request cannot be served."""
        prompt = token_ids(prompt)
        self.limits.check(prompt, sampling)
        start = request_start(number, prompt, sampling)
        return BatchRequest(start, self._stop_criteria(prompt, sampling), Stats(prompt_tokens=len(prompt)))

    def batch(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        cancelled: Callable[[int], bool] = lambda index: False,
    ) -> tuple[list[BatchRequest], Generator[tuple[BatchRequest, TokenChunk]]]:
        """Decodes several prompts. Returns one request per prompt, numbered from 0, and the generator of `run_batch`
        over them.

        `cancelled`: called with the index of a prompt; returns True to end its request. Raises UserError before
        anything is computed if a request cannot be served.
        """
        requests: list[BatchRequest] = []
        for index, pair in enumerate(pair_with_sampling(prompts, sampling)):
            try:
                requests.append(self.request(index, *pair))
            except UserError as error:
                raise UserError(f"request {index} of the batch: {error}") from None
        waiting = iter(requests)
        return requests, self.run_batch(lambda: next(waiting, None), lambda request: cancelled(request.number))

    def run_batch(
        self, next_request: NextRequest, cancelled: IsCancelled
    ) -> Generator[tuple[BatchRequest, TokenChunk]]:
        """Decodes requests that may arrive while others run: concurrently if the decoding supports that, otherwise one
        after the other. Yields (request, chunk) pairs.

        `next_request`: returns the next waiting request, or None.
        `cancelled`: called between rounds and before each prefill chunk; returns True to end a request.

        Finish reasons are those of `TreeBatchDecoding.batch`.
        """
        decoding = self.decoding
        if isinstance(decoding, TreeBatchDecoding) and decoding.max_requests > 1:  # asks `cancelled` before each chunk
            with self._engine_lock():
                return self._rounds(self._batch(decoding.batch(next_request, cancelled)), lambda: False)
        prefilling: BatchRequest | None = None

        def fetch() -> BatchRequest | None:
            nonlocal prefilling
            prefilling = next_request()
            return prefilling

        with self._engine_lock():
            if isinstance(decoding, PopulationDecoding) and decoding.max_requests > 1:
                chunks = self._batch(decoding.batch(fetch, cancelled))
            else:
                chunks = self._run_one_by_one(fetch, cancelled)
            return self._rounds(chunks, lambda: prefilling is not None and cancelled(prefilling))

    def _stream(self, prompt: tuple[int, ...], sampling: SamplingParams) -> Generator[TokenChunk]:
        stats: Stats | None = None
        with closing(super()._stream(prompt, sampling)) as chunks:
            try:
                for chunk in chunks:
                    stats = self.stats if stats is None else stats
                    yield chunk
            finally:
                if stats is not None:
                    self._on_finished(stats)

    def _batch(self, chunks: Generator[tuple[BatchRequest, TokenChunk]]) -> Generator[tuple[BatchRequest, TokenChunk]]:
        """Yields the chunks of a batch. Raises UserError once a later request has ended the batch."""
        self._requests += 1
        number = self._requests
        with closing(chunks):
            for request, chunk in chunks:
                self.stats = request.stats
                if chunk.finish_reason is not None:
                    self._on_finished(request.stats)
                yield request, chunk
                require(self._requests == number, "this batch was ended by a later request: read it to its end first")

    def _run_one_by_one(
        self, next_request: NextRequest, cancelled: IsCancelled
    ) -> Generator[tuple[BatchRequest, TokenChunk]]:
        """Decodes the requests one after the other."""
        while (request := next_request()) is not None:
            reason = "abort"
            with suppress(Cancelled), closing(self._stream(request.start.tokens, request.start.sampling)) as chunks:
                try:
                    while not cancelled(request) and (chunk := next(chunks, None)) is not None:
                        request.stats, reason = self.stats, chunk.finish_reason or "abort"
                        yield request, chunk
                except NonFiniteLogits as error:
                    request.stats, request.error, reason = self.stats, error, "error"
            if reason in ("abort", "error"):
                yield request, request.ended_chunk(reason)

    def close(self) -> None:
        """Waits for the current round or prefill chunk, if any, ends its request and closes the engine."""
        self._closed = True
        with self._lock:
            if self._open is not None:
                with on_device(self._device):
                    self._open[0].close()

    def _rounds(self, chunks: Generator[Piece], cancelled: Callable[[], bool]) -> Generator[Piece]:
        """Yields the chunks, and holds the engine's lock while each of them is decoded. Background work is paused
        meanwhile. Raises UserError if memory does not suffice."""
        if self._background is not None:
            self._background.pause()
        try:
            while True:
                with self._engine_lock(chunks):
                    self._open = chunks, threading.get_ident()
                    self._cancel_check.cancelled = lambda: self._closed or cancelled()
                    try:
                        with on_device(self._device):
                            chunk = next(chunks, None)
                    except Cancelled:
                        require(not self._closed, CLOSED)
                        return
                    except (MemoryError, RuntimeError) as error:
                        if is_device_error(error):
                            self._on_device_error(error)
                            raise
                        if not is_out_of_gpu_memory(error):
                            raise
                        raise UserError(OUT_OF_MEMORY) from None
                if chunk is None:
                    return
                yield chunk
        finally:
            with self._lock:
                with on_device(self._device):
                    chunks.close()
                if self._open is not None and self._open[0] is chunks:
                    self._open = None
                if self._background is not None and self._open is None:
                    self._background.resume()

    @contextmanager
    def _engine_lock(self, mine: Generator[Any] | None = None) -> Iterator[None]:
        """Holds the engine's lock. Raises UserError, without waiting, if another thread's request is running or the
        engine is closed. `mine`: the stream that is read; it may belong to another thread."""
        taken = self._lock.acquire(blocking=False)
        try:
            others = self._open is not None and self._open[0] is not mine and self._open[1] != threading.get_ident()
            busy = "another thread's request is being served: an engine serves one thread at a time"
            require(not self._closed, CLOSED)
            require(taken and not others, busy)
            yield
        finally:
            if taken:
                self._lock.release()


def token_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    """Returns the token ids of a prompt, which may be NumPy or torch integers, as Python integers. Raises UserError on
    anything else."""
    tokens = prompt.tolist() if isinstance(prompt, np.ndarray | torch.Tensor) else prompt
    return coerce("prompt token", tuple[int, ...], tokens)


def pair_with_sampling(
    prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Sequence[int], SamplingParams]]:
    """Returns (prompt, sampling parameters) pairs. `sampling`: one set for all prompts, one set per prompt, or None for
    defaults. Raises UserError if it is neither of these."""
    if sampling is None or isinstance(sampling, SamplingParams):
        return [(prompt, sampling or SamplingParams()) for prompt in prompts]
    several = isinstance(sampling, Sequence) and all(isinstance(each, SamplingParams) for each in sampling)
    require(several, f"sampling must be SamplingParams, or one per prompt, not {truncated_repr(sampling)}")
    same = len(sampling) == len(prompts)
    require(same, f"got {len(sampling)} SamplingParams for {len(prompts)} prompts: pass one, or one per prompt")
    return [*zip(prompts, sampling, strict=True)]
