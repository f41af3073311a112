"""The second loop: requests as groups of particles, a round of all of them at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from swiftspec.decode import Observer, no_observer
from swiftspec.engine import Chunk, Stats, StopCriteria
from swiftspec.errors import NotFinite, UserError
from swiftspec.messages import Opening
from swiftspec.runtime.cancellation import Cancelled
from swiftspec.smc.group_result import Answer
from swiftspec.smc.population import WHOSE, Group


class Population(Protocol):
    """What decodes requests in mode smc. `SMC` says what the methods do."""

    @property
    def busy(self) -> tuple[float, float]: ...
    @property
    def drafted(self) -> int: ...
    @property
    def groups(self) -> Sequence[Group]: ...
    @property
    def exact(self) -> bool: ...
    @property
    def places(self) -> int: ...
    @property
    def has_room(self) -> bool: ...
    def admit(self, opening: Opening, stops: Collection[int], limit: int) -> Group: ...
    def launch(self) -> bool: ...
    def collect(self) -> None: ...
    def finish(self, group: Group) -> Answer: ...
    def leave(self, group: Group) -> None: ...


def decode_smc(
    population: Population, admit: Callable[[], bool] = lambda: False, tell: Observer = no_observer
) -> Iterator[tuple[Group, tuple[int, ...]]]:
    """Decodes the groups of a population, a round of all of them at a time, until the last has left.

    A round gives the tokens that all particles of a group have come to share, often none: nothing else is certain to be
    in its answer. The last ones, with `Group.answer`, are what is left of the particle that was picked; the group has
    left by then. One whose logits are no numbers leaves without an answer (`Group.broken`), and the others go on. As
    long as there is room `admit` is asked for another request; it says whether it has admitted one.
    """
    told: dict[Group, int] = {}

    def new(group: Group, tokens: Sequence[int]) -> tuple[Group, tuple[int, ...]]:
        since, told[group] = told.get(group, 0), len(tokens)
        tell("collected", tuple(tokens[since:]))
        return group, tuple(tokens[since:])

    while True:
        for group in [group for group in population.groups if group.over]:
            tokens = _last(population, group)
            population.leave(group)
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


def _last(population: Population, group: Group) -> Sequence[int]:
    """All tokens of a group that needs no further round."""
    try:
        return population.finish(group).tokens
    except NotFinite:
        return group.tokens


@dataclass(slots=True, eq=False)
class Request:
    """One request of a batch, which its opening numbers. Its times begin when it is admitted."""

    opening: Opening
    ends: StopCriteria
    stats: Stats
    error: UserError | None = None  # what has ended it, where its finish reason is "error"
    began: float = 0.0
    opened: float = 0.0
    spent: tuple[float, float] = (0.0, 0.0)  # by both models in forwards until it was admitted

    @property
    def number(self) -> int:
        return self.opening.request

    def cut(self, reason: str) -> Chunk:
        """The last chunk of a request that does not come to its own end."""
        self.stats.finish_reason = reason
        return Chunk((), 0, reason)


Arriving = Callable[[], Request | None]  # the next request that waits, if there is one
IsCancelled = Callable[[Request], bool]


class ParticleDecoding:
    """Groups of particles. A chunk often has no token: only what all particles share. The rest comes last."""

    def __init__(self, population: Population, tell: Observer = no_observer) -> None:
        self.population, self._tell = population, tell
        self._group: Group | None = None  # that of a request alone

    @property
    def busy(self) -> tuple[float, float]:
        return self.population.busy

    def open(self, opening: Opening, ends: StopCriteria) -> int:
        self._clear()
        self._tell("opening", opening)
        self._group = self.population.admit(opening, ends.stop_token_ids, ends.max_tokens)
        self._tell("opened")
        return self._group.kept

    def chunks(self, ends: StopCriteria, stats: Stats) -> Iterator[Chunk]:
        for group, tokens in decode_smc(self.population, tell=self._tell):
            if group.broken:
                raise NotFinite(WHOSE)
            yield self._chunk(group, tokens, stats)

    def close(self, stats: Stats) -> None:
        if self._group is not None:
            self._end(self._group, stats)
        self._clear()
        self._tell("closed", stats)

    def batch(self, arriving: Arriving, cancelled: IsCancelled) -> Generator[tuple[Request, Chunk]]:
        """Decodes requests side by side, as many as there are groups. Whenever there is room `arriving` is asked for
        another; the batch is over once it has none and all that came have ended.

        A request's last chunk says why it is the last: beside "stop" and "length", "abort" where `cancelled` names it,
        and "error" where its logits are no numbers (`Request.error`), of which the others notice nothing.
        """
        self._clear()
        here, gone = dict[Group, Request](), list[Request]()  # gone: before they had a group

        def admit() -> bool:
            request = arriving()
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
            for group, tokens in decode_smc(self.population, admit):
                while gone:
                    yield _aborted(gone.pop(0))
                request = here[group]
                if group.broken:
                    request.error = NotFinite(WHOSE)
                    yield request, self._timed(request, request.cut("error"))
                elif group.answer is None and cancelled(request):
                    self._end(group, request.stats)
                    self.population.leave(group)
                    yield request, self._timed(request, request.cut("abort"))
                else:
                    yield request, self._timed(request, self._chunk(group, tokens, request.stats))
            yield from map(_aborted, gone)
        finally:
            self._clear()

    def _admit(self, request: Request) -> Group:
        request.began = time.perf_counter()
        group = self.population.admit(request.opening, request.ends.stop_token_ids, request.ends.max_tokens)
        request.opened, request.spent = time.perf_counter(), self.busy
        request.stats.kept_tokens, request.stats.prompt_time = group.kept, request.opened - request.began
        return group

    def _timed(self, request: Request, chunk: Chunk) -> Chunk:
        busy = [now - before for now, before in zip(self.busy, request.spent, strict=True)]
        request.stats.clock(bool(chunk.token_ids), request.began, request.opened, busy)
        return chunk

    def _chunk(self, group: Group, tokens: tuple[int, ...], stats: Stats) -> Chunk:
        answer = group.answer
        stats.rounds, stats.drafted = group.rounds, group.rounds * self.population.drafted
        stats.tokens += len(tokens)
        accepted = 0
        if self.population.exact:
            new = group.accepted[len(stats.verified) :]
            accepted = min(sum(new), len(tokens))
            stats.verified += [(chain(self.population.drafted), tuple(range(count + 1)), ()) for count in new]
            stats.accepted += sum(new)
            stats.rounds = len(stats.verified)
            stats.drafted = stats.rounds * self.population.drafted
        else:
            stats.population = answer
        stats.finish_reason = None if answer is None else "stop" if answer.stopped else "length"
        return Chunk(tokens, accepted, stats.finish_reason)

    def _end(self, group: Group, stats: Stats) -> None:
        """Notes what became of a group, wherever it stands."""
        with suppress(NotFinite):  # then there is nothing to pick from
            answer = self.population.finish(group)
            stats.population = None if self.population.exact else answer

    def _clear(self) -> None:
        """Ends whatever is left of earlier requests."""
        self._group = None
        for group in [*self.population.groups]:
            self.population.leave(group)


def chain(steps: int) -> tuple[int, ...]:
    """The parents of a root and so many draft tokens after it."""
    return tuple(range(-1, steps))


def _aborted(request: Request) -> tuple[Request, Chunk]:
    return request, request.cut("abort")
