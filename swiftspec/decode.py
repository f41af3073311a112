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


def no_observer(event: Event, *about: Any) -> None:
    """Observes nothing."""


def decode(
    drafter: Drafter, verifier: Verifier, notify: Observer = no_observer
) -> Iterator[tuple[Proposal, VerifyResult]]:
    """Decodes the request that both roles have opened, a round at a time, until the consumer stops asking.

    A round is handed out once its result is on the way to the drafter. So what the consumer does with it (detokenising,
    printing) happens while the draft answers, and a stop costs no further forward.
    """
    while True:
        proposal = drafter.propose()
        notify("proposed", proposal)
        pending = verifier.submit(proposal)
        drafter.grow()
        notify("grown")
        result = pending.wait()
        notify("verified", proposal, result)
        drafter.observe(result)
        notify("observed", result)
        verifier.settle()
        notify("settled", proposal, result)
        yield proposal, result
        notify("taken")
