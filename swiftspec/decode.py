"""The two loops. Plain, serial, asynchronous and networked tree decoding differ only in what is handed in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

from swiftspec.messages import Proposal, VerifyResult
from swiftspec.runtime.drafter import Drafter
from swiftspec.runtime.verifier import Verifier

Event = Literal[
    "opening", "drafter opened", "opened", "proposed", "grown", "verified", "observed", "settled", "taken", "collected",
    "closed",
]  # fmt: skip
Observer = Callable[..., None]  # told of each event, with what it is about, at the moment when it has happened


def nobody(event: Event, *about: Any) -> None:
    """Observes nothing."""


def decode(drafter: Drafter, verifier: Verifier, tell: Observer = nobody) -> Iterator[tuple[Proposal, VerifyResult]]:
    """Decodes the request that both roles have opened, a round at a time, until the consumer stops asking.

    A round is handed out once its result is on the way to the drafter. So what the consumer does with it (detokenising,
    printing) happens while the draft answers, and a stop costs no further forward.
    """
    while True:
        proposal = drafter.propose()
        tell("proposed", proposal)
        pending = verifier.submit(proposal)
        drafter.grow()
        tell("grown")
        result = pending.wait()
        tell("verified", proposal, result)
        drafter.observe(result)
        tell("observed", result)
        verifier.settle()
        tell("settled")
        yield proposal, result
        tell("taken")


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
