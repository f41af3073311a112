"""Resampling of particles in plain torch: the end of an SMC round.

Not part of the operator protocol of the backends, since only particles need it. In shapes, N is the number of particles
per group. Source: SMC-SD engine v0.1 section 3.4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

PATH_HEADER_WORDS = 7  # int64 numbers in a path before its tokens; the first is the number of tokens


@dataclass(frozen=True, slots=True)
class ResamplingState:
    """Tensors of all groups of particles, which `resample` updates in place. A copied particle inherits its row of
    `mask`, `ends` and `path`."""

    log_weights: Tensor  # [groups, N] float64
    mask: Tensor  # [groups, N, slots] bool, tree slots that the particle attends to
    ends: Tensor  # [groups, N, 2] bool: whether the particle is finished, and whether by a stop token
    path: Tensor  # [groups, N, PATH_HEADER_WORDS + capacity] int64: header, tokens, unused elements
    log_z: Tensor  # [groups] float64, log of the mean weight, summed over the resamplings
    ess: Tensor  # [groups] float64, effective sample size, summed over the rounds
    resampled: Tensor  # [groups] int64, number of resamplings
    rounds: Tensor  # [groups] int64, number of rounds

    def fields(self) -> dict[str, Tensor]:
        """Returns the tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


Resample = Callable[[ResamplingState, Tensor, float, int], None]


def resample(groups: ResamplingState, uniform: Tensor, threshold: float, width: int) -> None:
    """Resamples in place each group whose effective sample size is below `threshold` * N; counts a round in all groups.

    `uniform` [groups] float64: one number in (0, 1) per group. `width`: number of columns of the mask in use; only
    these are copied. The operators do not depend on the weights, so the function can be captured in a CUDA graph.
    """
    weights = groups.log_weights
    count = weights.shape[1]
    rows = torch.arange(count, device=weights.device)
    shares = weights.softmax(-1)
    ess = effective_sample_size(shares)
    degenerate = ess < threshold * count
    source = torch.where(degenerate[:, None], systematic_resample(shares, uniform), rows)
    groups.log_z.add_(torch.where(degenerate, weights.logsumexp(-1) - math.log(count), 0))
    groups.ess.add_(ess)
    groups.resampled.add_(degenerate)
    groups.rounds.add_(1)
    weights.copy_(torch.where(degenerate[:, None], 0, weights))
    first = torch.arange(0, source.numel(), count, device=weights.device)  # of each group, among the rows of all groups
    source = (source + first[:, None]).flatten()
    for part in (groups.path.flatten(0, 1), groups.ends.flatten(0, 1), groups.mask.flatten(0, 1)[:, :width]):
        part.copy_(part.index_select(0, source))


def effective_sample_size(shares: Tensor) -> Tensor:
    """Returns the effective sample size [...] of normalised weights [..., N]: 1 / sum(shares^2), between 1 and N."""
    return shares.square().sum(-1).reciprocal()


def systematic_resample(shares: Tensor, uniform: Tensor) -> Tensor:
    """Returns the source row [..., N] of each row by systematic resampling. Row i has N * shares[i] copies on average.

    `shares`: normalised weights [..., N]. `uniform`: one number in (0, 1) per group [...]. Survivors keep their rows;
    surplus copies fill the remaining rows, both in order. Shapes and operations do not depend on the weights, so that a
    CUDA graph can capture them. Source: SMC-SD engine v0.1 section 3.4; Kitagawa 1996 for the scheme.
    """
    count = shares.shape[-1]
    rows = torch.arange(count, device=shares.device)
    edges = (rows + uniform[..., None]) / count
    chosen = torch.searchsorted(shares.cumsum(-1), edges, right=True).clamp_max(count - 1)
    copies = torch.zeros_like(chosen).scatter_add(-1, chosen, torch.ones_like(chosen))
    survives = copies > 0
    surplus = (copies - 1).clamp_min(0).cumsum(-1)
    vacancy = (~survives).cumsum(-1) - 1  # index among the vacant rows
    donor = torch.searchsorted(surplus, vacancy, right=True).clamp_max(count - 1)
    return torch.where(survives, rows, donor)
