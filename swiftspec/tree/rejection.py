"""Rejection sampling on a tree whose children were drawn from the draft without replacement.

At a node the target's law p meets children x_1, x_2, ... that were drawn from q. x_1 passes with min(1, p / q). If it
does not, p becomes norm(max(0, p - q)), q loses x_1 and is normalised again, and x_2 is judged by these; and so on.
When no child is left, the token is drawn from what p has become. The token so found follows p: see drawn.py for what
that asks of the proposal. q names at most `width` tokens; all others keep their ratios to each other, so that the whole
vocabulary is looked at twice only: for p's normaliser, and for the token that is drawn where a path ends.

Letters: r nodes with children, c children of the one that has most, `width` tokens of a q, m tokens of this rank.
Source: Jeon et al. 2024 (recursive rejection sampling), Leviathan et al. 2023 for the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.backends.reference.noise import counters, row_bits, row_keys, stream_key
from swiftspec.backends.reference.sampling import argmax_token
from swiftspec.messages import DraftProbs, Proposal
from swiftspec.sampling.noise import COIN_STREAM, RESIDUAL_STREAM
from swiftspec.sampling.sampler import Paths, Sampler
from swiftspec.tree.acceptance import Accepted

Families = dict[int, list[int]]  # node -> its children
RESIDUAL_SHARE = 1e-30  # share of p in a residual: it decides only where rounding leaves nothing else


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of the children of r nodes, and what p has become at the end of them."""

    accepted: Tensor  # [r] int64, the child's number among its siblings; -1: none
    inside: Tensor  # [r, width] float64, of the tokens that q names
    outside: Tensor  # [r] float64, log of the factor that all other tokens of p have gained
    overlap: Tensor  # [r] float64, 1 - TV(p, q): the chance, before anything is drawn, that the first child is accepted


def verify_siblings(p: Tensor, q: Tensor, child_index: Tensor, coins: Tensor) -> Verdict:
    """Sibling by sibling, for r nodes at once.

    `p`, `q` [r, width] float64: probabilities of the tokens that q names, of which q's sum to 1 or nearly so; `places`
    [r, c]: where among them the children stand, in the order drawn, -1 where there is none; `coins` [r, c] uniform.
    """
    p = torch.where(q > 0, p, 0)
    overlap = torch.minimum(p, q / q.sum(-1, keepdim=True).clamp_min(RESIDUAL_SHARE)).sum(-1)
    out = (1 - p.sum(-1, keepdim=True)).clamp_min(0)
    outside = torch.zeros_like(out)
    accepted = torch.full_like(child_index[:, :1], -1)
    for i in range(child_index.shape[1]):
        own = child_index[:, i : i + 1]
        live = (own >= 0) & (accepted < 0)
        own = own.clamp_min(0)
        q = q / q.sum(-1, keepdim=True).clamp_min(RESIDUAL_SHARE)
        passes = coins[:, i : i + 1] * q.gather(-1, own) < p.gather(-1, own)
        accepted = torch.where(live & passes, i, accepted)
        failed = live & ~passes
        rest = (p - q).clamp_min(0) + RESIDUAL_SHARE * p
        whole = rest.sum(-1, keepdim=True) + out
        p, out = torch.where(failed, rest / whole, p), torch.where(failed, out / whole, out)
        outside = torch.where(failed, outside - whole.log(), outside)
        q = torch.where(failed, q.scatter(-1, own, 0), q)
    return Verdict(accepted.squeeze(-1), p, outside.squeeze(-1), overlap)


class RejectionSampling:
    """Verifies the proposals of one request. On several ranks all must ask, and all get the same.

    Nobody looks at a value between logits and verdict: every node is judged, and has the token drawn with which a path
    would end there, though one of them is enough. `noise` and `coins` may be those of a graph.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.noise = sampler.noise_of(RESIDUAL_STREAM)
        self.noise_rows = self.noise.rows
        key = torch.tensor([stream_key(sampler.params.seed, COIN_STREAM)], dtype=torch.uint32)
        self.coins = key.view(torch.int32).to(sampler.device)

    def __call__(self, proposal: Proposal, logits: Tensor, paths: Paths | None, positions: Tensor) -> Accepted:
        """As `Accept`. Raises ValueError where the proposal does not tell what its nodes were drawn from."""
        numbers, width = pack_draft_probs(proposal, len(proposal.tokens))
        numbers = torch.from_numpy(numbers).to(logits.device)
        return rejection_path(proposal, self.verdicts(logits, paths, positions, numbers, width).cpu().numpy())

    def verdicts(self, logits: Tensor, paths: Any, positions: Tensor, numbers: Tensor, width: int) -> Tensor:
        """For each row of logits [n, 3] float64: which child is accepted (`Judged`), the overlap, and the token that
        ends a path that ends there. `numbers` and `width` as `told` has them."""
        shaped, shard = self._sampler.process_logits(logits, paths), self._sampler.shard
        named, q, places = numbers.split((width, width, numbers.shape[1] - 2 * width), 1)
        named, places = named.long(), places.long()
        if shard is None:
            values, total = shaped.gather(-1, named), shaped.logsumexp(-1, keepdim=True)
        else:
            values, total = shard.values(shaped, named)
        bits = row_bits(row_keys(self.coins, positions + 1), counters(range(places.shape[1]), shaped.device))
        coins = bits.to(torch.float64).add_(0.5).mul_(2.0**-32)
        judged = verify_siblings((values - total).double().exp(), q, places, coins)
        columns = range(shaped.shape[-1]) if shard is None else shard.tokens
        # what p has become; tokens that q does not name, or another rank has, go to a column of nobody's
        inside = judged.inside.log() - judged.outside.unsqueeze(1) + total
        here = (q > 0) & (named >= columns.start) & (named < columns.stop)
        at = torch.where(here, named - columns.start, shaped.shape[-1])
        scores = F.pad(shaped, (0, 1)).scatter(1, at, inside.to(shaped.dtype))[:, :-1]
        block, rows = self.noise_rows(positions + 1, columns, scores.dtype)
        noisy = scores + block[rows]
        last = argmax_token(noisy) if shard is None else shard.argmax(noisy)
        return torch.stack((judged.accepted.double(), judged.overlap, last.double()), 1)


def pack_draft_probs(
    proposal: Proposal, rows: int, padded: Callable[[int], int] = lambda most: most
) -> tuple[NDArray[np.float64], int]:
    """What a proposal says its children were drawn from: a row for each node, and more up to `rows`, of the `width`
    tokens that q names, their q, and where among them the c children stand, -1 where there is none; and `width`.

    `padded` makes more columns of c. Raises ValueError on a child that cannot have been drawn there.
    """
    check_draft_probs(proposal)
    families, drawn = _families(proposal), proposal.draft_probs
    if not families or drawn is None:
        return np.tile([0.0, 0.0, -1.0], (rows, 1)), 1  # a token that was never drawn, and no child
    nodes, places, width = list(families), _child_index(proposal, drawn, families), drawn.tokens.shape[1]
    out = np.zeros((rows, 2 * width + padded(places.shape[1])))
    out[:, 2 * width :] = -1
    out[nodes, :width], out[nodes, width : 2 * width] = drawn.tokens, drawn.probs
    out[nodes, 2 * width : 2 * width + places.shape[1]] = places
    return out, width


def rejection_path(proposal: Proposal, judged: NDArray[np.float64]) -> Accepted:
    """Down a proposal from accepted child to accepted child; `judged` as `Rejection.judged` has it."""
    families, path, tokens = _families(proposal), [0], []
    while (child := int(judged[path[-1], 0])) >= 0:
        path.append(families[path[-1]][child])
        tokens.append(proposal.tokens[path[-1]])
    overlaps = tuple(float(judged[node, 1]) for node in path if node in families)
    return Accepted(path, [*tokens, int(judged[path[-1], 2])], overlaps)


def check_draft_probs(proposal: Proposal) -> None:
    """Raises ValueError on a proposal that does not say what its children were drawn from, or on a child that cannot
    have been drawn there."""
    families = _families(proposal)
    if families and proposal.draft_probs is None:
        raise ValueError("verify reject was sent a proposal that does not say what its tokens were drawn from")
    if families and proposal.draft_probs is not None:
        _child_index(proposal, proposal.draft_probs, families)


def _families(proposal: Proposal) -> Families:
    """The children of each node that has some, in the order drawn."""
    families: Families = {}
    for node, parent in enumerate(proposal.parents[1:], 1):
        families.setdefault(parent, []).append(node)
    return dict(sorted(families.items()))


def _child_index(proposal: Proposal, drawn: DraftProbs, families: Families) -> NDArray[np.int64]:
    """Where in its row of `drawn` each child stands: [rows, c], -1 where there is none. Raises ValueError on one that
    cannot have been drawn there."""
    places = np.full((len(families), max(map(len, families.values()))), -1)
    for row, children in enumerate(families.values()):
        for i, child in enumerate(children):
            (found,) = np.nonzero((drawn.tokens[row] == proposal.tokens[child]) & (drawn.probs[row] > 0))
            if len(found) != 1:
                raise ValueError(f"node {child} of a proposal was not drawn from what it says")
            places[row, i] = found[0]
    return places
