"""The two loops: tree decoding, in which plain, serial, asynchronous and networked decoding differ only in what is
handed in, and the population's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from swiftspec.runtime.drafter import Drafter
from swiftspec.runtime.verifier import Verifier
from swiftspec.smc.population import Population


@dataclass(frozen=True, slots=True)
class Round:
    """What one round gave: the target's tokens (accepted draft tokens, then the bonus) and the nodes verified for them,
    the root not counted. Of a tree also its parents, the path that was accepted, and the result's overlaps."""

    tokens: tuple[int, ...]
    drafted: int
    parents: tuple[int, ...] = ()
    path: tuple[int, ...] = ()
    overlaps: tuple[float, ...] = ()


def decode(drafter: Drafter, verifier: Verifier) -> Iterator[Round]:
    """Decodes the request that both roles have opened, a round at a time, until the consumer stops asking.

    A round is handed out once its result is on the way to the drafter. So what the consumer does with it (detokenising,
    printing) rides under the draft's answer, and a stop costs no further forward.
    """
    proposal = drafter.propose()
    while True:
        pending = verifier.submit(proposal)
        drafter.grow()
        result = pending.wait()
        drafter.observe(result)
        verifier.settle()
        yield Round(result.tokens, len(proposal.tokens) - 1, proposal.parents, result.path, result.overlaps)
        proposal = drafter.propose()


def decode_smc(worker: Population) -> Iterator[Round]:
    """Decodes the request that the worker has opened, a round at a time, to its end.

    A round gives the tokens that all particles have come to share, often none: nothing else is certain to be in the
    answer. The last one brings what is left of the particle that was picked, `worker.answer`.
    """
    told = 0
    while worker.launch():
        shared = worker.collect().tokens
        yield Round(tuple(shared[told:]), worker.plan.particles * worker.plan.smc_draft_tokens)
        told = len(shared)
    yield Round(tuple(worker.finish().tokens[told:]), 0)
