"""What a round of particles ends with, in plain torch: groups are weighed, and resampled where weights are uneven.

It stands beside the other operators of this folder, apart from them: only particles ask for it. Letters: G groups of N
particles, W tree slots that a round looks at. Source: SMC-SD engine v0.1 section 3.4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

HEAD = 7  # words of a path before its tokens; the first says how many tokens there are


@dataclass(frozen=True, slots=True)
class Weighed:
    """What resampling reads and changes, in place. A copy of a particle takes over its rows of mask, ends and path."""

    log_weights: Tensor  # [G, N] float64
    mask: Tensor  # [G, N, slots] bool
    ends: Tensor  # [G, N, 2] bool
    path: Tensor  # [G, N, HEAD + room] int64; what stands behind the tokens that there are is nobody's
    log_z: Tensor  # [G] float64, of all resamplings so far
    ess: Tensor  # [G] float64, summed over the rounds
    resampled: Tensor  # [G] int64, rounds that were
    rounds: Tensor  # [G] int64

    def fields(self) -> dict[str, Tensor]:
        """By name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


Resample = Callable[[Weighed, Tensor, float, int], None]


def resample(groups: Weighed, uniform: Tensor, threshold: float, width: int) -> None:
    """Resamples each group whose effective sample size is below `threshold` N, by its number of `uniform` [G] float64;
    and does the same work where it is not. Of the mask the first `width` columns are copied: nobody has set others."""
    weights = groups.log_weights
    count = weights.shape[1]
    rows = torch.arange(count, device=weights.device)
    shares = weights.softmax(-1)
    ess = effective(shares)
    poor = ess < threshold * count
    source = torch.where(poor[:, None], systematic(shares, uniform), rows)
    groups.log_z.add_(torch.where(poor, weights.logsumexp(-1) - math.log(count), 0))
    groups.ess.add_(ess)
    groups.resampled.add_(poor)
    groups.rounds.add_(1)
    weights.copy_(torch.where(poor[:, None], 0, weights))
    first = torch.arange(0, source.numel(), count, device=weights.device)  # of each group, among all rows
    source = (source + first[:, None]).flatten()
    for part in (groups.path.flatten(0, 1), groups.ends.flatten(0, 1), groups.mask.flatten(0, 1)[:, :width]):
        part.copy_(part.index_select(0, source))


def effective(shares: Tensor) -> Tensor:
    """The effective sample size [...] of shares of the weight [..., N]: 1 / sum of their squares, in 1..N."""
    return shares.square().sum(-1).reciprocal()


def systematic(shares: Tensor, uniform: Tensor) -> Tensor:
    """Whose copy each row becomes [..., N]: systematic resampling of shares of the weight [..., N], E(copies of i) =
    N shares_i, by one number of `uniform` [...] in (0, 1) for all N.

    Survivors keep their rows, and the surplus copies of the strong fill the rows of the weak, both in order. No branch:
    the same operators whatever the weights. Source: SMC-SD engine v0.1 section 3.4; Kitagawa 1996 for the scheme.
    """
    count = shares.shape[-1]
    rows = torch.arange(count, device=shares.device)
    edges = (rows + uniform[..., None]) / count
    chosen = torch.searchsorted(shares.cumsum(-1), edges, right=True).clamp_max(count - 1)
    copies = torch.zeros_like(chosen).scatter_add(-1, chosen, torch.ones_like(chosen))
    lives = copies > 0
    surplus = (copies - 1).clamp_min(0).cumsum(-1)
    vacancy = (~lives).cumsum(-1) - 1  # its number among the vacant rows
    donor = torch.searchsorted(surplus, vacancy, right=True).clamp_max(count - 1)
    return torch.where(lives, rows, donor)
