"""The decoding loop of several requests with a draft tree each.

Every request runs as a coroutine, on its own drafter and verifier (runtime/coroutines.py). The loop resumes all of them
until each waits for a forward, and then runs one forward for all: expansions as long as any request expands its tree,
then the verification of all proposals under one row budget, then one prefill chunk of one new request. A long prompt
therefore delays the other requests by one chunk per round, and the next prompt by one chunk. A request whose prompt
begins like one that is being prefilled waits for it, and then begins with its states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count

import numpy as np

from swiftspec.batching.batch_request import BatchRequest, IsCancelled, NextRequest
from swiftspec.cache.prefix_cache import MIN_CACHED_TOKENS, common_prefix_len
from swiftspec.engine import Stats, StopCriteria, TokenChunk, TreeDecoding, decode_request
from swiftspec.errors import UserError
from swiftspec.messages import RequestStart
from swiftspec.params import SamplingParams
from swiftspec.runtime.cancellation import Cancelled
from swiftspec.runtime.coroutines import (
    PREFILL,
    VERIFICATION,
    CallQueue,
    RequestCoroutine,
    joint_calls,
    suspend,
)
from swiftspec.runtime.sequence_runner import SequencePool


class RunningRequest(RequestCoroutine):
    """A request that runs on one of the decodings of a batch."""

    def __init__(self, request: BatchRequest, decoding: TreeDecoding, number: int) -> None:
        """`number`: identifies the request in messages between ranks."""
        super().__init__(self._decode)
        self.request, self.decoding, self._is_current = request, decoding, True
        start = replace(request.start, request=number)
        self._chunks = decode_request(decoding, start, request.stop_criteria, request.stats, lambda: self._is_current)
        self.num_sequences = _num_sequences(request.start.sampling)
        self.prefilled = False  # whether its prompt is in the caches
        self.between_rounds = False  # whether it is suspended between two rounds

    def decode_round(self) -> TokenChunk:
        """Decodes a round of a request that is alone, and suspended between two rounds, without resuming its coroutine.
        This saves two switches, 40 us: the weights of a model displace everything else from the CPU's caches.
        A prefill within the round, such as that of a draft that is opened late, is not suspended then."""
        return next(self._chunks)

    def end(self) -> bool:
        ended = super().end()
        if not ended:  # another thread closes the engine: the coroutine stays suspended and must not close a later one
            self._is_current = False
            self.decoding.close(self.request.stats)
        return ended

    def _decode(self) -> None:
        with closing(self._chunks):
            for chunk in self._chunks:
                suspend(chunk)


class TreeBatchDecoding:
    """Decoding of up to `len(decodings)` requests at a time, or of one request without the loop."""

    def __init__(
        self,
        decodings: Sequence[TreeDecoding],
        pools: Sequence[SequencePool],
        calls: CallQueue,
        captured_graphs: Callable[[], int] = lambda: 0,
    ) -> None:
        """`decodings`: each with a drafter and a verifier of its own. `pools`: of the target, and of the draft if there
        is one. `calls`: of all runners."""
        self.decodings, self.pools, self._calls, self.captured_graphs = decodings, pools, calls, captured_graphs
        self._running = deque[RunningRequest]()
        self._numbers = count(1)  # of requests; those of callers may recur

    @property
    def max_requests(self) -> int:
        """Maximum number of requests that are decoded concurrently; a guided one counts twice."""
        return len(self.decodings)

    @property
    def busy(self) -> tuple[float, float]:
        return self.decodings[0].busy

    def open(self, start: RequestStart, stop_criteria: StopCriteria) -> int:
        self._end_all()
        return self.decodings[0].open(replace(start, request=next(self._numbers)), stop_criteria)

    def chunks(self, stop_criteria: StopCriteria, stats: Stats) -> Iterator[TokenChunk]:
        return self.decodings[0].chunks(stop_criteria, stats)

    def close(self, stats: Stats) -> None:
        self.decodings[0].close(stats)

    def batch(self, next_request: NextRequest, cancelled: IsCancelled) -> Generator[tuple[BatchRequest, TokenChunk]]:
        """Decodes requests concurrently. Yields (request, chunk) pairs.

        `next_request`: called while there is room; the batch ends once it returns None and all requests have ended. A
        guided request waits until two sequences are free, and later requests wait behind it. A request whose prompt
        begins like one that is being prefilled waits until that is done.
        `cancelled`: called before a request is admitted, after each round and before each prefill chunk.

        The finish reason of a request's last chunk is "stop", "length", "abort" if `cancelled` returned True for it, or
        "error" if the request has failed (`BatchRequest.error`); the other requests are not affected.
        """
        self._end_all()
        waiting = list[BatchRequest]()
        try:
            while True:
                for request in [each for each in waiting if cancelled(each)]:
                    waiting.remove(request)
                    yield request, request.ended_chunk("abort")
                while self._has_room(1, waiting) and (request := next_request()):
                    if cancelled(request):
                        yield request, request.ended_chunk("abort")
                    else:
                        waiting.append(request)
                for request in list(waiting):
                    if not self._has_room(_num_sequences(request.start.sampling)):
                        break
                    if not self._shares_prefill(request):
                        waiting.remove(request)
                        self._admit(request)
                if not self._running:
                    return
                if len(self._running) > 1 or waiting:
                    yield from self._advance(cancelled)
                else:
                    waiting += yield from self._decode_alone(self._running[0], next_request, cancelled)
        finally:
            self._end_all()

    def _has_room(self, sequences: int, before: Sequence[BatchRequest] = ()) -> bool:
        """Returns whether a decoding and enough sequences are free for a request that takes `sequences`. `before`: the
        requests that wait for theirs."""
        in_use = sum([running.num_sequences for running in self._running])
        return in_use + sum([_num_sequences(each.start.sampling) for each in before]) + sequences <= self.max_requests

    def _shares_prefill(self, request: BatchRequest) -> bool:
        """Returns whether the prompt of a running request is being prefilled that begins like that of a new one, for
        more tokens than the caches hold."""
        prefilling = [running.request.start.tokens for running in self._running if not running.prefilled]
        if not prefilling or not self.pools[0].reuses_prefixes or request.start.num_cached_tokens is not None:
            return False
        wanted = np.array(request.start.tokens[:-1], np.int64)
        shared = max(common_prefix_len(np.array(tokens, np.int64), wanted) for tokens in prefilling)
        return shared >= MIN_CACHED_TOKENS and shared > self.pools[0].cached_len(request.start.tokens)

    def _admit(self, request: BatchRequest) -> None:
        in_use = [running.decoding for running in self._running]
        decoding = next(each for each in self.decodings if each not in in_use)
        self._running.append(RunningRequest(request, decoding, next(self._numbers)))

    def _decode_alone(
        self, running: RunningRequest, next_request: NextRequest, cancelled: IsCancelled
    ) -> Generator[tuple[BatchRequest, TokenChunk], None, Sequence[BatchRequest]]:
        """Decodes the only request, with less work per round than `_advance`, until it ends or another one arrives.
        Returns the requests that have arrived."""
        self._calls.company, self._calls.num_requests = False, 1
        has_room = self._has_room(1)
        while not cancelled(running.request):
            if running.waiting is not None:
                self._run([running])
            if (chunk := self._resume(running, alone=True)) is not None:
                yield running.request, chunk
                if chunk.finish_reason is not None:
                    return ()
            if has_room and (arrived := next_request()) is not None:
                return [arrived]
        self._end(running)
        yield running.request, running.request.ended_chunk("abort")
        return ()

    def _advance(self, cancelled: IsCancelled) -> Iterator[tuple[BatchRequest, TokenChunk]]:
        """Resumes all requests that do not wait for a call, and then runs calls, if all wait for one."""
        calls = [running.waiting for running in self._running if running.waiting is not None]
        prefilling = sum([call.priority == PREFILL for call in calls])
        self._calls.company = len(self._running) > 1
        self._calls.num_requests = max(len(self._running) - prefilling, 1)
        for running in list(self._running):
            if cancelled(running.request):
                self._end(running)
                yield running.request, running.request.ended_chunk("abort")
            elif running.waiting is None and (chunk := self._resume(running)) is not None:
                yield running.request, chunk
        if self._running and all(running.waiting is not None for running in self._running):
            self._run_calls()

    def _resume(self, running: RunningRequest, *, alone: bool = False) -> TokenChunk | None:
        """Resumes a request until its next call or chunk. Returns the chunk, None for a call. `alone`: whether it is
        the only one, so that its rounds need not be suspended."""
        if not running.in_own_thread:
            raise UserError("these requests run in another thread: read all of a batch in one thread")
        try:
            value = running.decode_round() if alone and running.between_rounds else running.resume()
            running.between_rounds = isinstance(value, TokenChunk)
            running.prefilled |= isinstance(value, TokenChunk) or value.priority != PREFILL
            if not isinstance(value, TokenChunk):
                running.waiting = value
                return None
            if value.finish_reason is None:
                return value
            running.resume()  # completes its statistics
        except Cancelled:  # the engine is closed: requests are cancelled between their calls
            raise
        except UserError as error:
            running.end()
            running.request.error = error
            value = running.request.ended_chunk("error")
        self._running.remove(running)
        return value

    def _run_calls(self) -> None:
        """Runs the calls that come first, as one. A prefill chunk is among them if the next forward verifies."""
        waiting = [(running, running.waiting) for running in self._running if running.waiting is not None]
        new = next((running for running, call in waiting if call.priority == PREFILL), None)
        trees = joint_calls([running for running, call in waiting if call.priority != PREFILL])
        verifies = all(call.priority >= VERIFICATION for running, call in waiting if running in trees)
        if verifies and new is not None:
            self._run([new])
            self._running.remove(new)
            self._running.append(new)  # the next chunk is that of another request
        if trees:  # after the chunk, since the verified requests read logits and hidden states of the last forward
            self._run(trees)

    def _run(self, requests: Sequence[RunningRequest]) -> None:
        self._calls.run([running.waiting for running in requests if running.waiting is not None])
        for running in requests:
            running.waiting = None

    def _end(self, running: RunningRequest) -> None:
        self._running.remove(running)
        running.end()

    def _end_all(self) -> None:
        while self._running:
            self._end(self._running[0])
        self._calls.company, self._calls.num_requests = False, 1


def _num_sequences(sampling: SamplingParams) -> int:
    """Returns the number of sequences of the target that a request takes."""
    return 2 if sampling.guided else 1
