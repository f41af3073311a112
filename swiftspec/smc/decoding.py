"""The second loop: requests as groups of particles, a round of all of them at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from swiftspec.decode import Observer, nobody
from swiftspec.engine import Chunk, Ends, Stats
from swiftspec.errors import NotFinite
from swiftspec.messages import Opening
from swiftspec.runtime.pause import Cancelled
from swiftspec.smc.population import Answer, Group


class Population(Protocol):
    """What decodes requests in mode smc. `SMC` says what the methods do."""

    @property
    def busy(self) -> tuple[float, float]: ...
    @property
    def drafted(self) -> int: ...
    @property
    def groups(self) -> Sequence[Group]: ...
    @property
    def has_room(self) -> bool: ...
    def admit(self, opening: Opening, stops: Collection[int], limit: int) -> Group: ...
    def launch(self) -> bool: ...
    def collect(self) -> None: ...
    def finish(self, group: Group) -> Answer: ...
    def leave(self, group: Group) -> None: ...


def decode_smc(
    population: Population, admit: Callable[[], bool] = lambda: False, tell: Observer = nobody
) -> Iterator[tuple[Group, tuple[int, ...]]]:
    """Decodes the groups of a population, a round of all of them at a time, until the last has left.

    A round gives the tokens that all particles of a group have come to share, often none: nothing else is certain to be
    in its answer. The last ones, with `Group.answer`, are what is left of the particle that was picked; the group has
    left by then. As long as there is room `admit` is asked for another request; it says whether it has admitted one.
    """
    told: dict[Group, int] = {}

    def new(group: Group, tokens: Sequence[int]) -> tuple[Group, tuple[int, ...]]:
        since, told[group] = told.get(group, 0), len(tokens)
        tell("collected", tuple(tokens[since:]))
        return group, tuple(tokens[since:])

    while True:
        for group in [group for group in population.groups if group.over]:
            answer = population.finish(group)
            population.leave(group)
            yield new(group, answer.tokens)
            del told[group]
        while population.has_room and admit():
            pass
        if not population.groups:
            return
        if population.launch():
            population.collect()
            for group in [*population.groups]:
                yield new(group, group.tokens)


@dataclass(slots=True, eq=False)
class Request:
    """One request of a batch. Its times begin when it is admitted."""

    opening: Opening
    ends: Ends
    stats: Stats
    group: Group | None = None
    began: float = 0.0
    opened: float = 0.0
    spent: tuple[float, float] = (0.0, 0.0)  # by both models in forwards until it was admitted


class ParticleDecoding:
    """Groups of particles. A chunk often has no token: only what all particles share. The rest comes last."""

    def __init__(self, population: Population, tell: Observer = nobody) -> None:
        self.population, self._tell = population, tell
        self._group: Group | None = None  # that of a request alone
        self.reading = 0  # which request of a batch has its prompt read

    @property
    def busy(self) -> tuple[float, float]:
        return self.population.busy

    def open(self, opening: Opening, ends: Ends) -> int:
        self._clear()
        self._tell("opening", opening)
        self._group = self.population.admit(opening, ends.stops, ends.budget)
        self._tell("opened")
        return self._group.kept

    def chunks(self, ends: Ends, stats: Stats) -> Iterator[Chunk]:
        for group, tokens in decode_smc(self.population, tell=self._tell):
            yield self._chunk(group, tokens, stats)

    def close(self, stats: Stats) -> None:
        if self._group is not None:
            with suppress(NotFinite):  # then there is nothing to pick from
                stats.population = self.population.finish(self._group)
        self._clear()
        self._tell("closed", stats)

    def batch(self, requests: Sequence[Request], cancelled: Callable[[int], bool]) -> Generator[tuple[int, Chunk]]:
        """Decodes them side by side, as many as there are groups; the others follow as places become free. Yields
        chunks with the number of their request. One that `cancelled` names leaves without a last chunk.

        Raises NotFinite on logits that are no numbers, which ends them all.
        """
        self._clear()
        waiting, here = iter(range(len(requests))), dict[Group, int]()

        def admit() -> bool:
            number = next(waiting, None)
            if number is not None and not cancelled(number):
                self.reading = number
                with suppress(Cancelled):  # in the midst of its prompt
                    here[self._admit(requests[number])] = number
            return number is not None

        try:
            for group, tokens in decode_smc(self.population, admit):
                number = here[group]
                request = requests[number]
                if group not in self.population.groups and group.answer is None:
                    continue  # it left while this round's chunks were handed out
                yield number, self._timed(request, self._chunk(group, tokens, request.stats))
                if group.answer is None and cancelled(number):
                    self.population.leave(group)
        finally:
            self._clear()

    def _admit(self, request: Request) -> Group:
        request.began = time.perf_counter()
        group = self.population.admit(request.opening, request.ends.stops, request.ends.budget)
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
        stats.population = answer
        stats.finish_reason = None if answer is None else "stop" if answer.stopped else "length"
        return Chunk(tokens, 0, stats.finish_reason)

    def _clear(self) -> None:
        """Ends whatever is left of earlier requests."""
        self._group = None
        for group in [*self.population.groups]:
            self.population.leave(group)
