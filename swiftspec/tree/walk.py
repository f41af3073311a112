"""What of a proposal stands: down the tree, as far as the target's own tokens are among its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from swiftspec.messages import Proposal
from swiftspec.sampling.sampler import Paths, Sampler


@dataclass(frozen=True, slots=True)
class Accepted:
    """What of a proposal stands: its nodes from the root down, and the tokens along them, as many; the last token is
    the bonus token. `overlaps`: of the path's nodes whose children were drawn, 1 - TV(p, q)."""

    path: list[int]
    tokens: list[int]
    overlaps: tuple[float, ...] = ()


class Accept(Protocol):
    """Decides by the target's logits what of a proposal stands."""

    def __call__(self, proposal: Proposal, logits: Tensor, paths: Paths | None, positions: Tensor, /) -> Accepted:
        """`logits` raw, a row for each node; `paths` of the rows, for penalties; `positions` [n] of the nodes."""
        ...


class Match:
    """Samples the target's token at every node and walks down while it is a child: the text is plain decoding's."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __call__(self, proposal: Proposal, logits: Tensor, paths: Paths | None, positions: Tensor) -> Accepted:
        drawn = self._sampler.draw(logits, paths, positions).tolist()
        return Accepted(*walk(proposal.tokens, proposal.parents, drawn))


def walk(tokens: Sequence[int], parents: Sequence[int], sampled: Sequence[int]) -> tuple[list[int], list[int]]:
    """Walks down a proposal while the token that the target sampled after a node is one of its children.

    `tokens`, `parents`: the proposal's nodes in topological order, the root first; `sampled[i]`: the target's token
    after node i. Returns the accepted path (nodes, the root first) and the sampled tokens along it, as many: the last
    one is the bonus token. Source: paper section 3.1.
    """
    child = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    path, out = [0], [sampled[0]]
    while (node := child.get((path[-1], out[-1]))) is not None:
        path.append(node)
        out.append(sampled[node])
    return path, out


def paths(tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """Per node of a proposal, the tokens from below the root down to it."""
    rows: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        rows.append([] if parent < 0 else [*rows[parent], token])
    return rows
