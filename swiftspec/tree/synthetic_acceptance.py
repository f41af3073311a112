"""Synthetic acceptance: an acceptance rule that accepts a given mean number of tokens per round, for measurements.

The target runs and samples as always, so that a round takes the time of a real one, but the accepted path does not
depend on what it samples. The output is therefore not the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

from torch import Tensor

from swiftspec.backends.reference.noise import stream_key
from swiftspec.messages import Proposal
from swiftspec.sampling.noise import ACCEPTANCE_STREAM
from swiftspec.sampling.sampler import Paths, Sampler
from swiftspec.tree.acceptance import Accepted


class AcceptanceSchedule:
    """Number of accepted draft nodes of each round of a request: a low-discrepancy sequence with a given mean, which
    depends only on the seed and the round.

    The numbers are floor(L - 1) and ceil(L - 1), where L is the mean acceptance length. Any n successive rounds accept
    n (L - 1) nodes in total, up to a difference below 1. The seed determines the phase, so that over all seeds every
    round has the mean L.
    """

    def __init__(self, mean_length: float, seed: int) -> None:
        """`mean_length`: mean tokens per round, the bonus token included, at least 1."""
        self._nodes = mean_length - 1
        self._phase = stream_key(seed, ACCEPTANCE_STREAM) * 2.0**-32  # in [0, 1)

    def num_accepted(self, round_: int) -> int:
        """Returns the number of draft nodes that a round accepts. `round_`: number of the round, from 0."""
        return self._total(round_ + 1) - self._total(round_)

    def _total(self, rounds: int) -> int:
        """Returns the number of draft nodes that the first `rounds` rounds accept."""
        return floor(rounds * self._nodes + self._phase)


class SyntheticAcceptance:
    """Acceptance rule (`AcceptFn`) of one request by an `AcceptanceSchedule`: accepts the path along the children of
    the largest weight, and samples the target's token after it.

    A proposal that is less deep than the schedule demands is accepted to a leaf, and the nodes that it lacks are not
    accepted later. The mean number of tokens per round is then below `mean_length`.
    """

    def __init__(self, sampler: Sampler, mean_length: float) -> None:
        self._sampler = sampler
        self._schedule = AcceptanceSchedule(mean_length, sampler.params.seed)

    def __call__(self, proposal: Proposal, logits: Tensor, paths: Paths | None, positions: Tensor) -> Accepted:
        return self.accept(proposal, self._sampler.drawn(logits, paths, positions))

    def accept(self, proposal: Proposal, sampled: Sequence[int]) -> Accepted:
        """Returns the accepted path and its tokens. `sampled`: the target's token after each node; -1 where the logits
        are not finite."""
        path = self.path(proposal)
        return Accepted(path, [*(proposal.tokens[node] for node in path[1:]), sampled[path[-1]]])

    def path(self, proposal: Proposal) -> list[int]:
        """Returns the nodes of a proposal that are accepted, the root first."""
        return heaviest_path(proposal.parents, proposal.weights, self._schedule.num_accepted(proposal.round))


def heaviest_path(parents: Sequence[int], weights: Sequence[float], num_nodes: int) -> list[int]:
    """Returns the path from the root along the children of the largest weight, the first of several such children.

    `parents`, `weights`: the nodes of a proposal in topological order, the root first.
    `num_nodes`: number of nodes after the root; fewer are returned if the path ends at a leaf before.
    """
    child = dict[int, int]()  # of the largest weight, by parent
    for node in range(1, len(parents)):
        best = child.get(parents[node])
        if best is None or weights[node] > weights[best]:
            child[parents[node]] = node
    path = [0]
    while len(path) <= num_nodes and (node := child.get(path[-1])) is not None:
        path.append(node)
    return path
