"""Verification of a proposal by the target's own tokens: down the tree, as far as they are among its nodes."""

from __future__ import annotations

from collections.abc import Sequence


def walk(tokens: Sequence[int], parents: Sequence[int], sampled: Sequence[int]) -> tuple[list[int], list[int]]:
    """Walks down a proposal while the token that the target sampled after a node is one of its children.

    `tokens`, `parents`: the proposal's nodes in topological order, the root first; `sampled[i]`: the target's token
    after node i. Returns the accepted path (nodes, the root first) and the sampled tokens along it, as many: the last
    one is the bonus token. Source: paper section 3.1; design section 6.
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
