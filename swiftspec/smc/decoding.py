"""The second loop: a request as a population of particles, a chunk a round."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

from swiftspec.decode import Observer, nobody
from swiftspec.engine import Chunk, Ends, Stats
from swiftspec.errors import NotFinite
from swiftspec.messages import Opening


class Shared(Protocol):
    """Tokens that all particles have come to share, or those of the particle that was picked."""

    @property
    def tokens(self) -> Sequence[int]: ...


class Population(Protocol):
    """What decodes a request in mode smc: `launch` and `collect` in turn, `finish` once."""

    def launch(self) -> bool:
        """Starts a round. False where none is needed, or none fits."""
        ...

    def collect(self) -> Shared:
        """What is known by now of the rounds that were started."""
        ...

    def finish(self) -> Shared:
        """Picks one particle, once."""
        ...


def decode_smc(population: Population, tell: Observer = nobody) -> Iterator[tuple[int, ...]]:
    """Decodes the request that the population has opened, a round at a time, to its end.

    A round gives the tokens that all particles have come to share, often none: nothing else is certain to be in the
    answer. The last one brings what is left of the particle that was picked.
    """
    told = 0
    while population.launch():
        shared = population.collect().tokens
        new = tuple(shared[told:])
        tell("collected", new)
        yield new
        told = len(shared)
    rest = tuple(population.finish().tokens[told:])
    tell("collected", rest)
    yield rest


class ManagedPopulation(Population, Protocol):
    """A population that opens and closes requests and keeps count; `answer` is None until one particle is picked."""

    @property
    def busy(self) -> tuple[float, float]: ...
    @property
    def rounds(self) -> int: ...
    @property
    def drafted(self) -> int: ...  # draft tokens of a round
    @property
    def answer(self) -> Any: ...
    def open(self, opening: Opening, stops: Collection[int], limit: int) -> int: ...
    def close(self) -> None: ...


class ParticleDecoding:
    """A population of particles. A chunk often has no token: only what all particles share. The rest comes last."""

    def __init__(self, population: ManagedPopulation, tell: Observer = nobody) -> None:
        self.population, self._tell = population, tell

    @property
    def busy(self) -> tuple[float, float]:
        return self.population.busy

    def open(self, opening: Opening, ends: Ends) -> int:
        self._opened = False
        self._tell("opening", opening)
        kept = self.population.open(opening, ends.stops, ends.budget)
        self._opened = True
        self._tell("opened")
        return kept

    def chunks(self, ends: Ends, stats: Stats) -> Iterator[Chunk]:
        rounds = decode_smc(self.population, self._tell)
        while (tokens := self._next(rounds)) is not None:
            answer = self.population.answer
            stats.rounds = self.population.rounds
            stats.drafted += self.population.drafted if answer is None else 0
            stats.tokens += len(tokens)
            stats.finish_reason = None if answer is None else "stop" if answer.stopped else "length"
            yield Chunk(tokens, 0, stats.finish_reason)

    def _next(self, rounds: Iterator[tuple[int, ...]]) -> tuple[int, ...] | None:
        try:
            return next(rounds, None)
        except NotFinite:
            self._opened = False  # there is nothing to pick from
            raise

    def close(self, stats: Stats) -> None:
        if self._opened:
            stats.population = self.population.finish()
        self.population.close()
        self._tell("closed", stats)
