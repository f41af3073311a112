"""The decoding loop. Autoregressive, serial, asynchronous and remote decoding differ only in the drafter and the
verifier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from swiftspec.messages import Proposal, VerifyResult
from swiftspec.runtime.drafter import Drafter
from swiftspec.runtime.verifier import Verifier

Event = Literal[
    "opening",
    "drafter opened",
    "opened",
    "proposed",
    "grown",
    "verified",
    "observed",
    "settled",
    "taken",
    "collected",
    "closed",
]
Observer = Callable[..., None]  # called right after each event, with its name and the objects that `decode` passes


def no_observer(event: Event, *about: Any) -> None:
    """Ignores all events; default observer."""


def decode(
    drafter: Drafter, verifier: Verifier, notify: Observer = no_observer
) -> Iterator[tuple[Proposal, VerifyResult]]:
    """Runs the decoding loop of a request that `drafter` and `verifier` have opened, until the consumer stops
    iterating.

    Yields the proposal and the result of each round, after the result has been sent to the drafter. The consumer's work
    (detokenising, printing) therefore overlaps with the forwards of a draft in another process, and stopping costs no
    additional forward. `notify`: observer of the events of each round.
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
