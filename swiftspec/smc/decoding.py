"""The decoding loop of sequence groups: all requests of a batch advance by one round at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from swiftspec.decode import Observer, no_observer
from swiftspec.engine import Stats, StopCriteria, TokenChunk, VerifiedRound
from swiftspec.errors import NonFiniteLogits, UserError
from swiftspec.messages import RequestStart
from swiftspec.runtime.cancellation import Cancelled
from swiftspec.smc.group_result import GroupResult
from swiftspec.smc.population import EITHER_MODEL, SequenceGroup


class Population(Protocol):
    """A population of sequence groups, one per request; `LocalPopulation` documents the methods."""

    @property
    def busy(self) -> tuple[float, float]: ...
    @property
    def draft_tokens_per_round(self) -> int: ...
    @property
    def groups(self) -> Sequence[SequenceGroup]: ...
    @property
    def exact(self) -> bool: ...
    @property
    def max_requests(self) -> int: ...
    @property
    def has_room(self) -> bool: ...
    def admit(self, start: RequestStart, stops: Collection[int], limit: int) -> SequenceGroup: ...
    def launch(self) -> bool: ...
    def collect(self) -> None: ...
    def finish(self, group: SequenceGroup) -> GroupResult: ...
    def release(self, group: SequenceGroup) -> None: ...


def decode_population(
    population: Population, admit: Callable[[], bool] = lambda: False, on_event: Observer = no_observer
) -> Iterator[tuple[SequenceGroup, tuple[int, ...]]]:
    """Decodes the requests of a population round by round, until the last one is released. Yields (group, new tokens)
    pairs.

    After each round it yields for every group the new tokens that all its particles share, often none: only these are
    certain to be part of the answer. When a group is finished, one of its particles is picked as the answer
    (`SequenceGroup.answer`), the group is released, and the rest of the answer is yielded. A group whose logits are not
    finite is released without an answer (`SequenceGroup.not_finite`); the other groups continue.

    `admit`: called while the population has room; admits another request and returns whether it has.
    `on_event`: observer, called with "collected" and the tokens before they are yielded.
    """
    num_sent: dict[SequenceGroup, int] = {}  # tokens yielded so far

    def new(group: SequenceGroup, tokens: Sequence[int]) -> tuple[SequenceGroup, tuple[int, ...]]:
        since, num_sent[group] = num_sent.get(group, 0), len(tokens)
        on_event("collected", tuple(tokens[since:]))
        return group, tuple(tokens[since:])

    while True:
        for group in [group for group in population.groups if group.is_finished]:
            tokens = _last(population, group)
            population.release(group)
            yield new(group, tokens)
            del num_sent[group]
        while population.has_room and admit():
            pass
        if not population.groups:
            return
        if population.launch():
            population.collect()
            # a group that finished during `launch` has an answer; the loop above yields its remaining tokens
            for group in [group for group in population.groups if group.answer is None]:
                yield new(group, group.tokens)


def _last(population: Population, group: SequenceGroup) -> Sequence[int]:
    """Returns all tokens of a finished group: its answer, or the tokens that its particles share if logits are not
    finite."""
    try:
        return population.finish(group).tokens
    except NonFiniteLogits:
        return group.tokens


@dataclass(slots=True, eq=False)
class BatchRequest:
    """A request of a batch with its statistics. Its times begin with its prefill: they do not include the wait before
    it."""

    start: RequestStart
    stop_criteria: StopCriteria
    stats: Stats
    error: UserError | None = None  # set if its finish reason is "error"
    started_at: float = 0.0  # start of its prefill, in seconds of `time.perf_counter`
    admitted_at: float = 0.0  # end of its prefill
    busy_before: tuple[float, float] = (0.0, 0.0)  # `Population.busy` at `admitted_at`

    @property
    def number(self) -> int:
        return self.start.request

    def ended_chunk(self, reason: str) -> TokenChunk:
        """Returns the last chunk of a request that ends early: no tokens and the finish reason, which is also recorded
        in `stats`."""
        self.stats.finish_reason = reason
        return TokenChunk((), 0, reason)


NextRequest = Callable[[], BatchRequest | None]  # returns the next waiting request, or None
IsCancelled = Callable[[BatchRequest], bool]  # returns whether a request is to end early


class ParticleDecoding:
    """Decoding with sequence groups, for one request or for a batch.

    A chunk contains only the new tokens that all particles of the group share, so it is often empty; the last chunk
    contains the rest of the answer.
    """

    def __init__(self, population: Population, on_event: Observer = no_observer) -> None:
        self.population, self._on_event = population, on_event
        self._group: SequenceGroup | None = None  # group of the request that `open` has begun

    @property
    def busy(self) -> tuple[float, float]:
        return self.population.busy

    def open(self, start: RequestStart, stop_criteria: StopCriteria) -> int:
        self._release_all()
        self._on_event("opening", start)
        self._group = self.population.admit(start, stop_criteria.stop_token_ids, stop_criteria.max_tokens)
        self._on_event("opened")
        return self._group.num_cached_tokens

    def chunks(self, stop_criteria: StopCriteria, stats: Stats) -> Iterator[TokenChunk]:
        for group, tokens in decode_population(self.population, on_event=self._on_event):
            if group.not_finite:
                raise NonFiniteLogits(EITHER_MODEL)
            yield self._chunk(group, tokens, stats)

    def close(self, stats: Stats) -> None:
        if self._group is not None:
            self._end(self._group, stats)
        self._release_all()
        self._on_event("closed", stats)

    def batch(self, next_request: NextRequest, cancelled: IsCancelled) -> Generator[tuple[BatchRequest, TokenChunk]]:
        """Decodes requests concurrently, at most one per sequence group. Yields (request, chunk) pairs.

        `next_request`: called while a group is free; the batch ends once it returns None and all admitted requests have
        ended.
        `cancelled`: called before a request is admitted and after each round.

        The finish reason of a request's last chunk is "stop", "length", "abort" if `cancelled` returned True for it, or
        "error" if its logits are not finite (`BatchRequest.error`); the other requests are not affected.
        """
        self._release_all()
        active = dict[SequenceGroup, BatchRequest]()
        gone = list[BatchRequest]()  # cancelled before they had a group

        def admit() -> bool:
            request = next_request()
            if request is None:
                return False
            try:
                if cancelled(request):
                    raise Cancelled("the request was cancelled while it was queued")
                active[self._admit(request)] = request
            except Cancelled:  # before or during its prefill
                gone.append(request)
            return True

        try:
            for group, tokens in decode_population(self.population, admit):
                while gone:
                    yield _aborted(gone.pop(0))
                request = active[group]
                if group.not_finite:
                    request.error = NonFiniteLogits(EITHER_MODEL)
                    yield request, self._with_times(request, request.ended_chunk("error"))
                elif group.answer is None and cancelled(request):
                    self._end(group, request.stats)
                    self.population.release(group)
                    yield request, self._with_times(request, request.ended_chunk("abort"))
                else:
                    yield request, self._with_times(request, self._chunk(group, tokens, request.stats))
            yield from map(_aborted, gone)
        finally:
            self._release_all()

    def _admit(self, request: BatchRequest) -> SequenceGroup:
        request.started_at = time.perf_counter()
        group = self.population.admit(
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
        return chunk

    def _chunk(self, group: SequenceGroup, tokens: tuple[int, ...], stats: Stats) -> TokenChunk:
        answer = group.answer
        stats.rounds, stats.drafted = group.rounds, group.rounds * self.population.draft_tokens_per_round
        stats.tokens += len(tokens)
        accepted = 0
        if self.population.exact:
            new = group.accepted[len(stats.verified) :]
            accepted = min(sum(new), len(tokens))
            stats.verified += [
                VerifiedRound(chain_parents(self.population.draft_tokens_per_round), tuple(range(count + 1)))
                for count in new
            ]
            stats.accepted += sum(new)
            stats.rounds = len(stats.verified)
            stats.drafted = stats.rounds * self.population.draft_tokens_per_round
        else:
            stats.population = answer
        stats.finish_reason = None if answer is None else "stop" if answer.stopped else "length"
        return TokenChunk(tokens, accepted, stats.finish_reason)

    def _end(self, group: SequenceGroup, stats: Stats) -> None:
        """Picks the answer of a group, finished or not, and records its result in `stats`."""
        with suppress(NonFiniteLogits):  # then no particle can be picked
            answer = self.population.finish(group)
            stats.population = None if self.population.exact else answer

    def _release_all(self) -> None:
        """Releases all groups left over from earlier requests."""
        self._group = None
        for group in [*self.population.groups]:
            self.population.release(group)


def chain_parents(steps: int) -> tuple[int, ...]:
    """Returns the parents of the nodes of a chain: -1 for the root, then 0, 1, ... for its `steps` draft tokens."""
    return tuple(range(-1, steps))


def _aborted(request: BatchRequest) -> tuple[BatchRequest, TokenChunk]:
    return request, request.ended_chunk("abort")
