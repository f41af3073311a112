"""The second loop: requests as groups of particles, a round of all of them at a time."""

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
    """What decodes requests in mode smc. `SMC` says what the methods do."""

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
    def admit(self, opening: RequestStart, stops: Collection[int], limit: int) -> SequenceGroup: ...
    def launch(self) -> bool: ...
    def collect(self) -> None: ...
    def finish(self, group: SequenceGroup) -> GroupResult: ...
    def release(self, group: SequenceGroup) -> None: ...


def decode_population(
    population: Population, admit: Callable[[], bool] = lambda: False, on_event: Observer = no_observer
) -> Iterator[tuple[SequenceGroup, tuple[int, ...]]]:
    """Decodes the groups of a population, a round of all of them at a time, until the last has left.

    A round gives the tokens that all particles of a group have come to share, often none: nothing else is certain to be
    in its answer. The last ones, with `SequenceGroup.answer`, are what is left of the particle that was picked; the group has
    left by then. One whose logits are no numbers leaves without an answer (`SequenceGroup.not_finite`), and the others go on. As
    long as there is room `admit` is asked for another request; it says whether it has admitted one.
    """
    told: dict[SequenceGroup, int] = {}

    def new(group: SequenceGroup, tokens: Sequence[int]) -> tuple[SequenceGroup, tuple[int, ...]]:
        since, told[group] = told.get(group, 0), len(tokens)
        on_event("collected", tuple(tokens[since:]))
        return group, tuple(tokens[since:])

    while True:
        for group in [group for group in population.groups if group.is_finished]:
            tokens = _last(population, group)
            population.release(group)
            yield new(group, tokens)
            del told[group]
        while population.has_room and admit():
            pass
        if not population.groups:
            return
        if population.launch():
            population.collect()
            # one with an answer has come to its end in launching, and says all that is left at once
            for group in [group for group in population.groups if group.answer is None]:
                yield new(group, group.tokens)


def _last(population: Population, group: SequenceGroup) -> Sequence[int]:
    """All tokens of a group that needs no further round."""
    try:
        return population.finish(group).tokens
    except NonFiniteLogits:
        return group.tokens


@dataclass(slots=True, eq=False)
class BatchRequest:
    """One request of a batch, which its opening numbers. Its times begin when it is admitted."""

    opening: RequestStart
    stop_criteria: StopCriteria
    stats: Stats
    error: UserError | None = None  # what has ended it, where its finish reason is "error"
    started_at: float = 0.0
    admitted_at: float = 0.0
    busy_before: tuple[float, float] = (0.0, 0.0)  # by both models in forwards until it was admitted

    @property
    def number(self) -> int:
        return self.opening.request

    def ended_chunk(self, reason: str) -> TokenChunk:
        """The last chunk of a request that does not come to its own end."""
        self.stats.finish_reason = reason
        return TokenChunk((), 0, reason)


NextRequest = Callable[[], BatchRequest | None]  # the next request that waits, if there is one
IsCancelled = Callable[[BatchRequest], bool]


class ParticleDecoding:
    """Groups of particles. A chunk often has no token: only what all particles share. The rest comes last."""

    def __init__(self, population: Population, on_event: Observer = no_observer) -> None:
        self.population, self._on_event = population, on_event
        self._group: SequenceGroup | None = None  # that of a request alone

    @property
    def busy(self) -> tuple[float, float]:
        return self.population.busy

    def open(self, opening: RequestStart, stop_criteria: StopCriteria) -> int:
        self._release_all()
        self._on_event("opening", opening)
        self._group = self.population.admit(opening, stop_criteria.stop_token_ids, stop_criteria.max_tokens)
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
        """Decodes requests side by side, as many as there are groups. Whenever there is room `next_request` is asked for
        another; the batch is over once it has none and all that came have ended.

        A request's last chunk says why it is the last: beside "stop" and "length", "abort" where `cancelled` names it,
        and "error" where its logits are no numbers (`BatchRequest.error`), of which the others notice nothing.
        """
        self._release_all()
        here, gone = dict[SequenceGroup, BatchRequest](), list[BatchRequest]()  # gone: before they had a group

        def admit() -> bool:
            request = next_request()
            if request is None:
                return False
            try:
                if cancelled(request):
                    raise Cancelled("the request was cancelled before its turn")
                here[self._admit(request)] = request
            except Cancelled:  # or in the midst of its prompt
                gone.append(request)
            return True

        try:
            for group, tokens in decode_population(self.population, admit):
                while gone:
                    yield _aborted(gone.pop(0))
                request = here[group]
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
            request.opening, request.stop_criteria.stop_token_ids, request.stop_criteria.max_tokens
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
        """Notes what became of a group, wherever it stands."""
        with suppress(NonFiniteLogits):  # then there is nothing to pick from
            answer = self.population.finish(group)
            stats.population = None if self.population.exact else answer

    def _release_all(self) -> None:
        """Ends whatever is left of earlier requests."""
        self._group = None
        for group in [*self.population.groups]:
            self.population.release(group)


def chain_parents(steps: int) -> tuple[int, ...]:
    """The parents of a root and so many draft tokens after it."""
    return tuple(range(-1, steps))


def _aborted(request: BatchRequest) -> tuple[BatchRequest, TokenChunk]:
    return request, request.ended_chunk("abort")
