"""Acceptance by token matching: follows a proposal from the root as long as the target's tokens are among its nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from swiftspec.messages import Proposal
from swiftspec.sampling.sampler import Paths, Sampler


@dataclass(frozen=True, slots=True)
class Accepted:
    """The accepted path of a proposal, from the root down, and as many tokens along it. The last token is the bonus
    token, or -1 if its logits are not finite. `overlaps`: 1 - TV(p, q) for each node of the path that has sampled
    children."""

    path: list[int]
    tokens: list[int]
    overlaps: tuple[float, ...] = ()


# Determines the accepted path of a proposal. Arguments: the proposal; the target's raw logits, one row per node; the
# paths of the rows, for penalties; the positions [n] of the nodes.
AcceptFn = Callable[[Proposal, Tensor, Paths | None, Tensor], Accepted]


class TokenMatching:
    """Coupled verification: samples the target's token at every node and accepts a child whose token is equal, so that
    the output equals that of autoregressive decoding."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __call__(self, proposal: Proposal, logits: Tensor, paths: Paths | None, positions: Tensor) -> Accepted:
        drawn = self._sampler.draw(logits, paths, positions).tolist()
        return Accepted(*match_path(proposal.tokens, proposal.parents, drawn))


def match_path(tokens: Sequence[int], parents: Sequence[int], sampled: Sequence[int]) -> tuple[list[int], list[int]]:
    """Follows a proposal from the root as long as the token that the target sampled after a node is one of its
    children.

    `tokens`, `parents`: the nodes of the proposal in topological order, the root first. `sampled[i]`: the target's
    token after node i. Returns the accepted path (nodes, the root first) and as many sampled tokens along it; the last
    one is the bonus token, or -1 if its logits are not finite. Source: paper section 3.1.
    """
    child = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    path, out = [0], [sampled[0]]
    while (node := child.get((path[-1], out[-1]))) is not None:
        path.append(node)
        out.append(sampled[node])
    return path, out
