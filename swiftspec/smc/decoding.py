"""The decoding loop of sequence groups: all requests of a batch advance by one round at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from swiftspec.decode import Observer, no_observer
from swiftspec.engine import Stats, StopCriteria, TokenChunk
from swiftspec.errors import NonFiniteLogits, UserError
from swiftspec.messages import RequestStart
from swiftspec.runtime.cancellation import Cancelled
from swiftspec.smc.group_result import GroupResult
from swiftspec.smc.population import EITHER_MODEL, SequenceGroup


class Population(Protocol):
    """Decodes sequence groups; `LocalPopulation` documents the methods."""

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
    """Decodes the groups of a population, all of them round by round, until the last one is released.

    After a round it yields, for each group, the new tokens that all its particles share, often none: only these are
    certain to be part of the answer. The last tokens of a group, with `SequenceGroup.answer` set, complete the particle
    that was picked; the group has been released by then. A group whose logits are not finite is released without an
    answer (`SequenceGroup.not_finite`); the others continue. While there is room, `admit` is called to admit another
    request and returns whether it has.
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
            # a group with an answer finished during `launch`; its remaining tokens are yielded above
            for group in [group for group in population.groups if group.answer is None]:
                yield new(group, group.tokens)


def _last(population: Population, group: SequenceGroup) -> Sequence[int]:
    """All tokens of a finished group."""
    try:
        return population.finish(group).tokens
    except NonFiniteLogits:
        return group.tokens


@dataclass(slots=True, eq=False)
class BatchRequest:
    """One request of a batch. Its times are measured from admission."""

    start: RequestStart
    stop_criteria: StopCriteria
    stats: Stats
    error: UserError | None = None  # set if its finish reason is "error"
    started_at: float = 0.0
    admitted_at: float = 0.0
    busy_before: tuple[float, float] = (0.0, 0.0)  # busy time of both models at its admission

    @property
    def number(self) -> int:
        return self.start.request

    def ended_chunk(self, reason: str) -> TokenChunk:
        """The last chunk of a request that ends early, with its finish reason."""
        self.stats.finish_reason = reason
        return TokenChunk((), 0, reason)


NextRequest = Callable[[], BatchRequest | None]  # the next waiting request, if any
IsCancelled = Callable[[BatchRequest], bool]


class ParticleDecoding:
    """Decodes with sequence groups. A chunk often has no token, since it contains only what all particles share; the
    remaining tokens come last."""

    def __init__(self, population: Population, on_event: Observer = no_observer) -> None:
        self.population, self._on_event = population, on_event
        self._group: SequenceGroup | None = None  # of a single request

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
        """Decodes requests concurrently, as many as there are groups. While there is room `next_request` is called for
        another one; the batch ends once it returns None and all admitted requests have ended.

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
                    raise Cancelled("the request was cancelled before its turn")
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
                (chain_parents(self.population.draft_tokens_per_round), tuple(range(count + 1)), ()) for count in new
            ]
            stats.accepted += sum(new)
            stats.rounds = len(stats.verified)
            stats.drafted = stats.rounds * self.population.draft_tokens_per_round
        else:
            stats.population = answer
        stats.finish_reason = None if answer is None else "stop" if answer.stopped else "length"
        return TokenChunk(tokens, accepted, stats.finish_reason)

    def _end(self, group: SequenceGroup, stats: Stats) -> None:
        """Records the outcome of a group in any state."""
        with suppress(NonFiniteLogits):  # then no particle can be picked
            answer = self.population.finish(group)
            stats.population = None if self.population.exact else answer

    def _release_all(self) -> None:
        """Releases all groups left over from earlier requests."""
        self._group = None
        for group in [*self.population.groups]:
            self.population.release(group)


def chain_parents(steps: int) -> tuple[int, ...]:
    """The parents of a chain: a root and `steps` draft tokens."""
    return tuple(range(-1, steps))


def _aborted(request: BatchRequest) -> tuple[BatchRequest, TokenChunk]:
    return request, request.ended_chunk("abort")
