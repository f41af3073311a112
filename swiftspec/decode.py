"""The loop. Plain, serial, asynchronous and networked decoding differ only in the drafter and the verifier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

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
        tell("settled", proposal, result)
        yield proposal, result
        tell("taken")
