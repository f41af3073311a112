"""Acceptance rules of a verification: their signature, and token matching, the rule of coupled verification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from swiftspec.messages import Proposal
from swiftspec.sampling.sampler import Paths, Sampler


@dataclass(frozen=True, slots=True)
class Accepted:
    """The accepted path of a proposal and the output tokens along it.

    `path`: indices of the accepted nodes, the root first.
    `tokens`: the output token after each node of `path`; the last one is the bonus token, or -1 if its logits are not
    finite.
    `overlaps`: with rejection sampling, 1 - TV(p, q) for each node of `path` that has children, where TV is the total
    variation distance.
    """

    path: list[int]
    tokens: list[int]
    overlaps: tuple[float, ...] = ()


# Acceptance rule: returns the accepted path of a proposal. Arguments: the proposal; the target's raw logits, one row
# per node; the paths of the nodes, required if `Sampler.needs_paths`; the absolute positions [nodes].
AcceptFn = Callable[[Proposal, Tensor, Paths | None, Tensor], Accepted]


class TokenMatching:
    """Coupled verification: samples the target's token after every node and accepts the child with the same token, so
    that the output equals that of autoregressive decoding."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __call__(self, proposal: Proposal, logits: Tensor, paths: Paths | None, positions: Tensor) -> Accepted:
        drawn = self._sampler.drawn(logits, paths, positions)
        return Accepted(*match_path(proposal.tokens, proposal.parents, drawn))


def match_path(tokens: Sequence[int], parents: Sequence[int], sampled: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns the accepted path of a proposal under token matching, and the target's tokens along it.

    The path begins at the root and continues with the child whose token the target sampled after the current node,
    until there is no such child (paper section 3.1).

    `tokens`, `parents`: the nodes of the proposal in topological order, the root first.
    `sampled`: the target's token after each node; -1 where the logits are not finite.
    Returns (path, out): `path` are node indices, `out[i]` is the sampled token after `path[i]`; the last one is the
    bonus token.
    """
    child = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    path, out = [0], [sampled[0]]
    while (node := child.get((path[-1], out[-1]))) is not None:
        path.append(node)
        out.append(sampled[node])
    return path, out
