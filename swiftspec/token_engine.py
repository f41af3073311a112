"""`TokenEngine`: decodes token ids, one request or one batch of requests at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from swiftspec.backends.cpu.packed_weight_cache import BackgroundWriter
from swiftspec.backends.cuda.devices import is_device_error, is_out_of_gpu_memory
from swiftspec.batching.batch_request import BatchRequest, IsCancelled, NextRequest
from swiftspec.batching.tree_batch import TreeBatchDecoding
from swiftspec.builder.roles import Roles
from swiftspec.engine import Completion, Stats, StopCriteria, TokenChunk, decode_request, request_start
from swiftspec.errors import NonFiniteLogits, UserError, truncated_repr
from swiftspec.observe.draft_monitor import DraftMonitor
from swiftspec.observe.recorder import TraceListener
from swiftspec.params import SamplingParams
from swiftspec.runtime.cancellation import CancelCheck, Cancelled
from swiftspec.runtime.current_device import on_device
from swiftspec.settings_schema import coerce, require
from swiftspec.smc.decoding import PopulationDecoding

Piece = TypeVar("Piece")
CPU = torch.device("cpu")
CLOSED = "this engine is closed: create a new one"
BUSY = "another thread's request is being served: an engine serves one thread at a time"
OUT_OF_MEMORY = "not enough memory for this request: use a smaller max_model_len, or disable guidance"


class TokenEngine:
    """Decodes token ids with roles that are already built: the decoding interface of `LLMEngine`.

    The roles run local models, lead the ranks of a job, or call workers. Decodes one request at a time, or up to
    `max_num_seqs` concurrently.

    Serves one thread at a time: while a request of one thread is open, calls of other threads raise UserError. An open
    stream belongs to the thread that last requested a chunk; that thread may start another request, which ends the open
    one. After `close` every call raises UserError.
    """

    def __init__(
        self,
        roles: Roles,
        load_time: float = 0.0,
        writer: BackgroundWriter | None = None,
        cancel_check: CancelCheck | None = None,
        note: Callable[[str], object] = lambda line: None,
    ) -> None:
        """`load_time`: seconds that loading took.
        `writer`: background thread that writes packed weights to the disk cache between requests; None without a disk
        cache.
        `cancel_check`: the check that the runners of the roles call before each prefill chunk.
        `note`: receives a line if hardly any token of the draft is accepted.
        """
        self.roles, self.load_time, self.writer = roles, load_time, writer
        self.config, self.decoding, self.limits = roles.config, roles.decoding, roles.limits
        self.stats = Stats()  # of the latest request, updated while it runs
        self.device = CPU if roles.models is None else roles.models.options.device
        self._monitor = DraftMonitor(note)
        self._cancel_check = CancelCheck() if cancel_check is None else cancel_check
        self._requests = 0
        self._lock = threading.RLock()  # held during a round
        self._open: tuple[Generator[Any], int] | None = None  # the running request and its thread
        self._closed = False

    @property
    def max_model_len(self) -> int:
        """Maximum number of prompt and output tokens of a request."""
        return self.roles.limits.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of concurrently decoded requests."""
        return self.config.num_sequences

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary that target and draft share; token ids are below it."""
        return self.roles.limits.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-text tokens of the target, which end an output unless `ignore_eos` is set."""
        return self.roles.limits.eos_token_ids

    def generate(self, prompt: Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        """Decodes one request to its end and returns the completion.

        Raises UserError if the request cannot be served, for example because the prompt is empty or exceeds the
        context.
        """
        tokens = [token for chunk in self.stream(prompt, sampling) for token in chunk.token_ids]
        return Completion(tokens, self.stats.finish_reason or "length", self.stats)

    def stream(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Generator[TokenChunk]:
        """Streams one request: yields the verified tokens of each round; the last chunk has a finish reason. Closing
        the iterator ends the request.

        `prompt`: token ids, which may be NumPy or torch integers.
        `cancelled`: called before each prefill chunk, on the thread that reads the stream; if it returns True, the
        stream ends without yielding anything.

        A new request ends the current one; reading the stream of the ended request then raises UserError. Raises
        UserError before anything is computed if the request cannot be served.
        """
        sampling = sampling if sampling is not None else SamplingParams()
        require(
            isinstance(sampling, SamplingParams), f"sampling must be SamplingParams, not {truncated_repr(sampling)}"
        )
        self._require_free()
        return self._rounds(self._stream(self.request(0, prompt, sampling)), cancelled)

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Decodes several prompts, at most `max_num_seqs` concurrently, and returns completions in the order of
        prompts.

        `sampling` is one set of parameters for all prompts or one per prompt. The output of a prompt depends only on
        that prompt and its parameters, not on the other prompts. A request with non-finite logits ends with finish
        reason "error" without affecting the others. Raises UserError before any computation if a request cannot be
        served.
        """
        requests, chunks = self.batch(prompts, sampling)
        tokens: list[list[int]] = [[] for _ in requests]
        for request, chunk in chunks:
            tokens[request.number] += chunk.token_ids
        stats = [request.stats for request in requests]
        return [
            Completion(text, each.finish_reason or "length", each) for text, each in zip(tokens, stats, strict=True)
        ]

    def stream_batch(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        cancelled: Callable[[int], bool] = lambda index: False,
    ) -> Generator[tuple[int, TokenChunk]]:
        """Streams several prompts: like `generate_batch`, but yields (prompt index, chunk) pairs.

        `cancelled(index)` is called between rounds and before each prefill chunk; a request for which it returns True
        ends with finish reason "abort".
        """
        _, chunks = self.batch(prompts, sampling, cancelled)
        return _numbered(chunks)

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
            self._require_free()
            return self._rounds(self._batch(decoding.batch(next_request, cancelled)), lambda: False)
        prefilling: BatchRequest | None = None

        def fetch() -> BatchRequest | None:
            nonlocal prefilling
            prefilling = next_request()
            return prefilling

        self._require_free()
        if isinstance(decoding, PopulationDecoding) and decoding.max_requests > 1:
            chunks = self._batch(decoding.batch(fetch, cancelled))
        else:
            chunks = self._run_one_by_one(fetch, cancelled)
        return self._rounds(chunks, lambda: prefilling is not None and cancelled(prefilling))

    def _stream(self, request: BatchRequest) -> Generator[TokenChunk]:
        try:
            with closing(self._chunks(request)) as chunks:
                yield from chunks
        finally:
            self._monitor.add_rounds(request.stats.verified)

    def _chunks(self, request: BatchRequest) -> Generator[TokenChunk]:
        """Begins a request, which ends the one before it, and returns its chunks. The roles get a number that is unique
        in this engine, unlike that of the caller."""
        self._requests += 1
        number, self.stats = self._requests, request.stats
        start = replace(request.start, request=number)
        return decode_request(
            self.decoding, start, request.stop_criteria, request.stats, lambda: self._requests == number
        )

    def _stop_criteria(self, prompt: Sequence[int], sampling: SamplingParams) -> StopCriteria:
        negative = sampling.negative_prompt_ids if sampling.guided else ()
        budget = self.limits.max_model_len - max(len(prompt), len(negative))
        budget = budget if sampling.max_tokens is None else min(budget, sampling.max_tokens)
        eos = self.limits.eos_token_ids if sampling.grammar is not None or not sampling.ignore_eos else ()
        return StopCriteria(budget, {*sampling.stop_token_ids, *eos})

    def _batch(self, chunks: Generator[tuple[BatchRequest, TokenChunk]]) -> Generator[tuple[BatchRequest, TokenChunk]]:
        """Yields the chunks of a batch. Raises UserError once a later request has ended the batch."""
        self._requests += 1
        number = self._requests
        with closing(chunks):
            for request, chunk in chunks:
                self.stats = request.stats
                if chunk.finish_reason is not None:
                    self._monitor.add_rounds(request.stats.verified)
                yield request, chunk
                require(self._requests == number, "this batch was ended by a later request: read it to its end first")

    def _run_one_by_one(
        self, next_request: NextRequest, cancelled: IsCancelled
    ) -> Generator[tuple[BatchRequest, TokenChunk]]:
        """Decodes the requests one after the other."""
        while (request := next_request()) is not None:
            reason = "abort"
            try:
                with suppress(Cancelled), closing(self._chunks(request)) as chunks:
                    while not cancelled(request) and (chunk := next(chunks, None)) is not None:
                        reason = chunk.finish_reason or "abort"
                        yield request, chunk
            except NonFiniteLogits as error:
                request.error, reason = error, "error"
            finally:
                self._monitor.add_rounds(request.stats.verified)
            if reason in ("abort", "error"):
                yield request, request.ended_chunk(reason)

    def listen(self, listener: TraceListener | None) -> None:
        """Sets the listener that receives trace records, from the next request on. None removes the listener.

        The listener is called on the decoding thread with the records of several rounds. Functions in
        `observe.trace_format` convert records to trace lines in any thread; see
        docs/reference/trace.md.
        """
        self.roles.recorder.listener = listener

    def close(self, *, will_restart: bool = False) -> None:
        """Waits for the current round or prefill chunk, if any, and ends its request, shuts the other ranks down,
        closes the trace and continues writing the disk cache of packed weights for at most one second.

        Later requests raise UserError. `will_restart`: only disconnects from the other ranks, because a supervisor is
        about to restart this rank and its followers.
        """
        self._closed = True
        with self._lock:
            if self._open is not None:
                with on_device(self.device):
                    self._open[0].close()
        self.roles.close(will_restart=will_restart)
        if self.writer is not None:
            self.writer.close()

    def _rounds(self, chunks: Generator[Piece], cancelled: Callable[[], bool]) -> Generator[Piece]:
        """Yields the chunks, and holds the engine's lock while each of them is decoded. Background work is paused
        meanwhile. Raises UserError if memory does not suffice."""
        if self.writer is not None:
            self.writer.pause()

        def is_cancelled() -> bool:
            return self._closed or cancelled()

        try:
            while True:
                self._take_lock(chunks)
                try:
                    self._open, self._cancel_check.cancelled = (chunks, threading.get_ident()), is_cancelled
                    with on_device(self.device):
                        chunk = next(chunks, None)
                except Cancelled:
                    require(not self._closed, CLOSED)
                    return
                except (MemoryError, RuntimeError) as error:
                    self._translate(error)
                    raise
                finally:
                    self._lock.release()
                if chunk is None:
                    return
                yield chunk
        finally:
            with self._lock:
                with on_device(self.device):
                    chunks.close()
                if self._open is not None and self._open[0] is chunks:
                    self._open = None
                if self.writer is not None and self._open is None:
                    self.writer.resume()

    def _translate(self, error: Exception) -> None:
        """Raises UserError if memory did not suffice. Records an error of this process's GPU."""
        if is_device_error(error):
            if self.roles.models is not None:
                self.roles.models.record_device_error(error, self.config)
        elif is_out_of_gpu_memory(error):
            raise UserError(OUT_OF_MEMORY) from None

    def _require_free(self) -> None:
        """Raises UserError if another thread's request is running or the engine is closed."""
        self._take_lock(None)
        self._lock.release()

    def _take_lock(self, mine: Generator[Any] | None) -> None:
        """Takes the engine's lock. Raises UserError, without waiting, if another thread's request is running or the
        engine is closed. `mine`: the stream that is read; it may belong to another thread."""
        taken = self._lock.acquire(blocking=False)
        others = self._open is not None and self._open[0] is not mine and self._open[1] != threading.get_ident()
        if taken and not others and not self._closed:
            return
        if taken:
            self._lock.release()
        raise UserError(CLOSED if self._closed else BUSY)


def _numbered(chunks: Generator[tuple[BatchRequest, TokenChunk]]) -> Generator[tuple[int, TokenChunk]]:
    with closing(chunks):
        for request, chunk in chunks:
            yield request.number, chunk


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
