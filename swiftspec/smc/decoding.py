"""The decoding loop of sequence groups: all requests of a batch advance by one round at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import Protocol

from swiftspec.batching.batch_request import BatchRequest, IsCancelled, NextRequest
from swiftspec.decode import Observer, no_observer
from swiftspec.engine import Stats, StopCriteria, TokenChunk
from swiftspec.errors import NonFiniteLogits
from swiftspec.messages import RequestStart
from swiftspec.runtime.cancellation import Cancelled
from swiftspec.smc.group_result import GroupResult
from swiftspec.smc.scheduler import EITHER_MODEL
from swiftspec.smc.sequence_group import SequenceGroup


class Scheduler(Protocol):
    """A scheduler of sequence groups, one per request; `BatchScheduler` documents the methods."""

    @property
    def busy(self) -> tuple[float, float]: ...
    @property
    def draft_tokens_per_round(self) -> int: ...
    @property
    def groups(self) -> Sequence[SequenceGroup]: ...
    @property
    def max_requests(self) -> int: ...
    @property
    def has_room(self) -> bool: ...
    def admit(self, start: RequestStart, stops: Collection[int], limit: int) -> SequenceGroup: ...
    def step(self) -> bool: ...
    def finish(self, group: SequenceGroup) -> GroupResult: ...
    def cancel(self, group: SequenceGroup) -> GroupResult | None: ...
    def evict_group(self, group: SequenceGroup) -> None: ...


def decode_groups(
    scheduler: Scheduler, admit: Callable[[], bool] = lambda: False, on_event: Observer = no_observer
) -> Iterator[tuple[SequenceGroup, tuple[int, ...]]]:
    """Decodes the requests of a scheduler round by round, until the last one is evicted. Yields (group, new tokens)
    pairs.

    After each round it yields for every group the new tokens that all its particles share, often none: only these
    are certain to be part of the answer. When a group is finished, its answer is picked (`SequenceGroup.answer`),
    the group is evicted, and the rest of the answer is yielded. A group whose logits are not finite is evicted without
    an answer (`SequenceGroup.not_finite`); the other groups continue.

    `admit`: called before each round; admits the next waiting request and returns True, or returns False if there is
    none, or no room for it.
    `on_event`: observer, called with "collected" and the tokens before they are yielded.
    """
    num_sent: dict[SequenceGroup, int] = {}  # tokens yielded so far

    def new(group: SequenceGroup, tokens: Sequence[int]) -> tuple[SequenceGroup, tuple[int, ...]]:
        since, num_sent[group] = num_sent.get(group, 0), len(tokens)
        on_event("collected", tuple(tokens[since:]))
        return group, tuple(tokens[since:])

    while True:
        for group in [group for group in scheduler.groups if group.is_finished]:
            tokens = _last(scheduler, group)
            scheduler.evict_group(group)
            yield new(group, tokens)
            del num_sent[group]
        while admit():
            pass
        if not scheduler.groups:
            return
        if scheduler.step():
            # a group that finished during the launch has an answer; the loop above yields its remaining tokens
            for group in [group for group in scheduler.groups if group.answer is None]:
                yield new(group, group.tokens)


def _last(scheduler: Scheduler, group: SequenceGroup) -> Sequence[int]:
    """Returns all tokens of a finished group: its answer, or the tokens that its particles share if logits are not
    finite."""
    try:
        return scheduler.finish(group).tokens
    except NonFiniteLogits:
        return group.tokens


class PopulationDecoding:
    """Decoding in mode smc, for one request or for a batch.

    A chunk contains only the new tokens that all particles of the group share, so it is often empty; the last chunk
    contains the rest of the answer.
    """

    def __init__(
        self, scheduler: Scheduler, on_event: Observer = no_observer, captured_graphs: Callable[[], int] = lambda: 0
    ) -> None:
        """`captured_graphs`: returns the number of CUDA graphs that this process has captured."""
        self.scheduler, self._on_event, self.captured_graphs = scheduler, on_event, captured_graphs
        self._group: SequenceGroup | None = None  # group of the request that `open` has begun
        self._counted_graphs = 0  # captured graphs that a request of a batch, or what came before, counts

    @property
    def busy(self) -> tuple[float, float]:
        return self.scheduler.busy

    @property
    def max_requests(self) -> int:
        """See `BatchScheduler.max_requests`."""
        return self.scheduler.max_requests

    def open(self, start: RequestStart, stop_criteria: StopCriteria) -> int:
        self._evict_all()
        self._on_event("opening", start)
        self._group = self.scheduler.admit(start, stop_criteria.stop_token_ids, stop_criteria.max_tokens)
        self._on_event("opened")
        return self._group.num_cached_tokens

    def chunks(self, stop_criteria: StopCriteria, stats: Stats) -> Iterator[TokenChunk]:
        for group, tokens in decode_groups(self.scheduler, on_event=self._on_event):
            if group.not_finite:
                raise NonFiniteLogits(EITHER_MODEL)
            yield self._chunk(group, tokens, stats)

    def close(self, stats: Stats) -> None:
        if self._group is not None:
            self._cancel(self._group, stats)
        self._evict_all()
        self._on_event("closed", stats)

    def batch(self, next_request: NextRequest, cancelled: IsCancelled) -> Generator[tuple[BatchRequest, TokenChunk]]:
        """Decodes requests concurrently, at most one per sequence group. Yields (request, chunk) pairs.

        `next_request`: called while a cache sequence is free; the batch ends once it returns None and all admitted
        requests have ended.
        `cancelled`: called before a request is admitted and after each round.

        The finish reason of a request's last chunk is "stop", "length", "abort" if `cancelled` returned True for it, or
        "error" if its logits are not finite (`BatchRequest.error`); the other requests are not affected.
        """
        self._evict_all()
        self._counted_graphs = self.captured_graphs()
        active = dict[SequenceGroup, BatchRequest]()
        gone = list[BatchRequest]()  # cancelled before they had a group

        def admit() -> bool:
            if not self.scheduler.has_room or (request := next_request()) is None:
                return False
            if cancelled(request):
                gone.append(request)
                return True
            try:
                active[self._admit(request)] = request
            except Cancelled:  # during its prefill
                gone.append(request)
            return True

        try:
            for group, tokens in decode_groups(self.scheduler, admit):
                while gone:
                    yield _aborted(gone.pop(0))
                request = active[group]
                if group.not_finite:
                    request.error = NonFiniteLogits(EITHER_MODEL)
                    yield request, self._with_times(request, request.ended_chunk("error"))
                elif group.answer is None and cancelled(request):
                    self._cancel(group, request.stats)
                    yield request, self._with_times(request, request.ended_chunk("abort"))
                else:
                    yield request, self._with_times(request, self._chunk(group, tokens, request.stats))
            yield from map(_aborted, gone)
        finally:
            self._evict_all()

    def _admit(self, request: BatchRequest) -> SequenceGroup:
        request.started_at = time.perf_counter()
        group = self.scheduler.admit(
            request.start, request.stop_criteria.stop_token_ids, request.stop_criteria.max_tokens
        )
        request.admitted_at, request.busy_before = time.perf_counter(), self.busy
        request.stats.cached_tokens, request.stats.prompt_time = (
            group.num_cached_tokens,
            request.admitted_at - request.started_at,
        )
        return group

    def _with_times(self, request: BatchRequest, chunk: TokenChunk) -> TokenChunk:
        busy = [now - before for now, before in zip(self.busy, request.busy_before, strict=True)]
        request.stats.record_times(bool(chunk.token_ids), request.started_at, request.admitted_at, busy)
        captured = self.captured_graphs()
        request.stats.graph_captures += captured - self._counted_graphs
        self._counted_graphs = captured
        return chunk

    def _chunk(self, group: SequenceGroup, tokens: tuple[int, ...], stats: Stats) -> TokenChunk:
        answer = group.answer
        stats.tokens += len(tokens)
        stats.rounds, stats.drafted = group.rounds, group.rounds * self.scheduler.draft_tokens_per_round
        stats.population = answer
        stats.finish_reason = None if answer is None else "stop" if answer.stopped else "length"
        return TokenChunk(tokens, 0, stats.finish_reason)

    def _cancel(self, group: SequenceGroup, stats: Stats) -> None:
        """Evicts a group, finished or not, and records its answer in `stats`."""
        stats.population = self.scheduler.cancel(group)

    def _evict_all(self) -> None:
        """Evicts all groups left over from earlier requests."""
        self._group = None
        for group in [*self.scheduler.groups]:
            self.scheduler.evict_group(group)


def _aborted(request: BatchRequest) -> tuple[BatchRequest, TokenChunk]:
    return request, request.ended_chunk("abort")
