"""Union of two proposals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from swiftspec.messages import Proposal


def merge_proposals(first: Proposal, second: Proposal, count: Callable[[Sequence[float]], int]) -> Proposal:
    """Returns a proposal of the nodes of both with the largest weights. Nodes with the same path are one node, which
    has the larger weight and the source of that weight. Both proposals are of the same round.

    `count`: returns the number of nodes besides the root, from the weights of all of them, descending.
    """
    tokens, parents = [*first.tokens], [*first.parents]
    weights, sources = [*first.weights], [*first.sources]
    known = {edge: node for node, edge in enumerate(zip(parents, tokens, strict=True))}
    joined = [0]  # by node of `second`
    for node in range(1, len(second.tokens)):
        edge = joined[second.parents[node]], second.tokens[node]
        at = known.setdefault(edge, len(tokens))
        joined.append(at)
        if at == len(tokens):
            parents.append(edge[0])
            tokens.append(edge[1])
            weights.append(second.weights[node])
            sources.append(second.sources[node])
        elif second.weights[node] > weights[at]:
            weights[at], sources[at] = second.weights[node], second.sources[node]
    order = sorted(range(len(tokens)), key=lambda node: -weights[node])  # parents come first
    kept = order[: count([weights[node] for node in order[1:]]) + 1]
    place = {node: at for at, node in enumerate(kept)}
    return replace(
        first,
        tokens=tuple(tokens[node] for node in kept),
        parents=(-1, *(place[parents[node]] for node in kept[1:])),
        weights=tuple(weights[node] for node in kept),
        sources=tuple(sources[node] for node in kept),
    )
