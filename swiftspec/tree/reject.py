"""Rejection sampling on a tree whose children were drawn from the draft without replacement.

At a node the target's law p meets children x_1, x_2, ... that were drawn from q. x_1 passes with min(1, p / q). If it
does not, p becomes norm(max(0, p - q)), q loses x_1 and is normalised again, and x_2 is judged by these; and so on.
When no child is left, the token is drawn from what p has become. The token so found follows p: see drawn.py for what
that asks of the proposal. q names at most `width` tokens; all others keep their ratios to each other, so that the whole
vocabulary is looked at twice only: for p's normaliser, and for the one token that is drawn in the end.

Letters: r nodes with children, c children of the one that has most, `width` tokens of a q, m tokens of this rank.
Source: Jeon et al. 2024 (recursive rejection sampling), Leviathan et al. 2023 for the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.backends.reference.noise import counters, row_bits, row_keys, stream_key
from swiftspec.backends.reference.sampling import best
from swiftspec.messages import Drawn, Proposal
from swiftspec.sampling.noise import COIN_STREAM, RESIDUAL_STREAM
from swiftspec.sampling.sampler import Paths, Sampler, Shard
from swiftspec.tree.walk import Accepted

Families = dict[int, list[int]]  # node -> its children
TINY = 1e-30  # share of p in a residual: it decides only where rounding leaves nothing else


@dataclass(frozen=True, slots=True)
class Judged:
    """What became of the children of r nodes, and what p has become at the end of them."""

    accepted: Tensor  # [r] int64, the child's number among its siblings; -1: none
    inside: Tensor  # [r, width] float64, of the tokens that q names
    outside: Tensor  # [r] float64, log of the factor that all other tokens of p have gained
    overlap: Tensor  # [r] float64, 1 - TV(p, q): the chance, before anything is drawn, that the first child is accepted


def judge(p: Tensor, q: Tensor, places: Tensor, coins: Tensor) -> Judged:
    """Sibling by sibling, for r nodes at once.

    `p`, `q` [r, width] float64: probabilities of the tokens that q names, of which q's sum to 1 or nearly so; `places`
    [r, c]: where among them the children stand, in the order drawn, -1 where there is none; `coins` [r, c] uniform.
    """
    p = torch.where(q > 0, p, 0)
    overlap = torch.minimum(p, q / q.sum(-1, keepdim=True).clamp_min(TINY)).sum(-1)
    out = (1 - p.sum(-1, keepdim=True)).clamp_min(0)
    outside = torch.zeros_like(out)
    accepted = torch.full_like(places[:, :1], -1)
    for i in range(places.shape[1]):
        own = places[:, i : i + 1]
        live = (own >= 0) & (accepted < 0)
        own = own.clamp_min(0)
        q = q / q.sum(-1, keepdim=True).clamp_min(TINY)
        passes = coins[:, i : i + 1] * q.gather(-1, own) < p.gather(-1, own)
        accepted = torch.where(live & passes, i, accepted)
        failed = live & ~passes
        rest = (p - q).clamp_min(0) + TINY * p
        whole = rest.sum(-1, keepdim=True) + out
        p, out = torch.where(failed, rest / whole, p), torch.where(failed, out / whole, out)
        outside = torch.where(failed, outside - whole.log(), outside)
        q = torch.where(failed, q.scatter(-1, own, 0), q)
    return Judged(accepted.squeeze(-1), p, outside.squeeze(-1), overlap)


class Rejection:
    """Verifies the proposals of one request. On several ranks all must ask, and all get the same."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._noise = sampler.noise_of(RESIDUAL_STREAM)
        key = torch.tensor([stream_key(sampler.params.seed, COIN_STREAM)], dtype=torch.uint32)
        self._coins = key.view(torch.int32).to(sampler.device)

    def __call__(self, proposal: Proposal, logits: Tensor, paths: Paths | None, positions: Tensor) -> Accepted:
        """As `Accept`. Raises ValueError where the proposal does not tell what its nodes were drawn from."""
        shaped, shard = self._sampler.shape(logits, paths), self._sampler.shard
        families = _families(proposal)
        path, tokens, overlaps = [0], [], []
        scores = shaped[:1]
        if families:
            family = {node: row for row, node in enumerate(families)}
            nodes = torch.tensor(list(families), device=shaped.device)
            judged, residual = self._judge(proposal, families, shaped[nodes], positions[nodes], shard)
            accepted = judged.accepted.tolist()
            while (row := family.get(path[-1])) is not None and accepted[row] >= 0:
                path.append(families[path[-1]][accepted[row]])
                tokens.append(proposal.tokens[path[-1]])
            scores = shaped[path[-1] :][:1] if row is None else residual(row)
            chances = judged.overlap.tolist()
            overlaps = [chances[family[node]] for node in path if node in family]
        block, rows = self._noise.rows(positions[path[-1:]] + 1, _columns(shard, scores), scores.dtype)
        noisy = scores + block[rows]
        last = best(noisy) if shard is None else shard.argmax(noisy)
        return Accepted(path, [*tokens, int(last)], tuple(overlaps))

    def _judge(
        self, proposal: Proposal, families: Families, shaped: Tensor, positions: Tensor, shard: Shard | None
    ) -> tuple[Judged, Callable[[int], Tensor]]:
        """What became of the children of these rows; and, for one of them, the scores [1, m] that it leaves."""
        drawn = proposal.drawn
        if drawn is None:
            raise ValueError("verify reject was sent a proposal that does not say what its tokens were drawn from")
        device = shaped.device
        named = torch.from_numpy(drawn.tokens).to(device, torch.int64)
        q = torch.from_numpy(drawn.probs).to(device, torch.float64)
        if shard is None:
            values, total = shaped.gather(-1, named), shaped.logsumexp(-1, keepdim=True)
        else:
            values, total = shard.values(shaped, named)
        places = torch.from_numpy(_places(proposal, drawn, families)).to(device)
        bits = row_bits(row_keys(self._coins, positions + 1), counters(range(places.shape[1]), device))
        coins = bits.to(torch.float64).add_(0.5).mul_(2.0**-32)
        judged = judge((values - total).double().exp(), q, places, coins)

        def residual(row: int) -> Tensor:
            first = _columns(shard, shaped).start
            here = (q[row] > 0) & (named[row] >= first) & (named[row] < first + shaped.shape[-1])
            inside = judged.inside[row].log() - judged.outside[row] + total[row]
            scores = shaped[row : row + 1].clone()
            scores[0, named[row][here] - first] = inside[here].to(scores.dtype)
            return scores

        return judged, residual


def check_drawn(proposal: Proposal) -> None:
    """Raises ValueError on a proposal that does not say what its children were drawn from, or on a child that cannot
    have been drawn there."""
    families = _families(proposal)
    if families and proposal.drawn is None:
        raise ValueError("verify reject was sent a proposal that does not say what its tokens were drawn from")
    if families and proposal.drawn is not None:
        _places(proposal, proposal.drawn, families)


def _columns(shard: Shard | None, shaped: Tensor) -> range:
    return range(shaped.shape[-1]) if shard is None else shard.tokens


def _families(proposal: Proposal) -> Families:
    """The children of each node that has some, in the order drawn."""
    families: Families = {}
    for node, parent in enumerate(proposal.parents[1:], 1):
        families.setdefault(parent, []).append(node)
    return dict(sorted(families.items()))


def _places(proposal: Proposal, drawn: Drawn, families: Families) -> NDArray[np.int64]:
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
