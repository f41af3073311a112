"""The one tree-decoding loop. Plain, serial, asynchronous and networked decoding differ only in what is handed in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from swiftspec.worker.drafter import Drafter
from swiftspec.worker.verifier import Verifier


@dataclass(frozen=True, slots=True)
class Round:
    """What one round gave: the target's tokens (accepted draft tokens, then the bonus) and the nodes verified for them,
    the root not counted."""

    tokens: tuple[int, ...]
    drafted: int


def decode(drafter: Drafter, verifier: Verifier) -> Iterator[Round]:
    """Decodes the request that both roles have opened, a round at a time, until the consumer stops asking.

    A round is handed out after the next one is submitted. So what the consumer does with it (detokenising, printing)
    rides under the target's forward, wherever the target works by itself, and what it decides (a stop) takes effect one
    round late.
    """
    proposal = drafter.propose()
    done: Round | None = None
    while True:
        pending = verifier.submit(proposal)
        if done is not None:
            yield done
        drafter.grow()
        result = pending.wait()
        drafter.observe(result)
        verifier.settle()
        done = Round(result.tokens, len(proposal.tokens) - 1)
        proposal = drafter.propose()
