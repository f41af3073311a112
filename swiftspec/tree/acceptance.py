"""What of a proposal stands: down the tree, as far as the target's own tokens are among its nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from swiftspec.messages import Proposal
from swiftspec.sampling.sampler import Paths, Sampler


@dataclass(frozen=True, slots=True)
class Accepted:
    """What of a proposal stands: its nodes from the root down, and the tokens along them, as many; the last token is
    the bonus token, -1 where logits are not finite. `overlaps`: of the path's nodes with drawn children, 1 - TV."""

    path: list[int]
    tokens: list[int]
    overlaps: tuple[float, ...] = ()


# Decides by the target's logits what stands of a proposal: raw logits, a row for each node; paths of the rows, for
# penalties; positions [n] of the nodes.
AcceptFn = Callable[[Proposal, Tensor, Paths | None, Tensor], Accepted]


class TokenMatching:
    """Samples the target's token at every node and walks down while it is a child: the text is plain decoding's."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __call__(self, proposal: Proposal, logits: Tensor, paths: Paths | None, positions: Tensor) -> Accepted:
        drawn = self._sampler.draw(logits, paths, positions).tolist()
        return Accepted(*match_path(proposal.tokens, proposal.parents, drawn))


def match_path(tokens: Sequence[int], parents: Sequence[int], sampled: Sequence[int]) -> tuple[list[int], list[int]]:
    """Walks down a proposal while the token that the target sampled after a node is one of its children.

    `tokens`, `parents`: the proposal's nodes in topological order, the root first; `sampled[i]`: the target's token
    after node i. Returns the accepted path (nodes, the root first) and the sampled tokens along it, as many: the last
    one is the bonus token, or -1 where the logits made none. Source: paper section 3.1.
    """
    child = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    path, out = [0], [sampled[0]]
    while (node := child.get((path[-1], out[-1]))) is not None:
        path.append(node)
        out.append(sampled[node])
    return path, out
