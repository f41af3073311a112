"""The decoding loop. Autoregressive, serial, asynchronous and remote decoding differ only in the drafter and the
verifier."""

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
Observer = Callable[..., None]  # called right after each event, with the event and its objects


def no_observer(event: Event, *about: Any) -> None:
    """Ignores all events."""


def decode(
    drafter: Drafter, verifier: Verifier, notify: Observer = no_observer
) -> Iterator[tuple[Proposal, VerifyResult]]:
    """Decodes the request that both roles have opened, one round per iteration, until the consumer stops iterating.

    A round is yielded after its result has been sent to the drafter. The consumer's work (detokenising, printing)
    therefore overlaps with the draft's forward, and stopping costs no additional forward.
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
