"""Particles: the rows of a group in mode smc, with their weights. The rows of the tree mask record their genealogy.

Copies of a particle that are made before a token's KV exists share the token's slot and write the same values to it. So
fan-out and resampling copy mask rows and move no KV, and the reference count of a slot is the sum of its mask column.

Shapes: N particles per group, K draft tokens per round; `width` is the number of tree slots in use, the window.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from swiftspec.backends.reference import resampling
from swiftspec.batching.rows import GroupRows
from swiftspec.config import GroupShape

WEIGHT_FIELDS = ("log_weights", "log_z", "ess", "resampled", "rounds")


class Particles(GroupRows):
    """State of the particles of all groups. A particle is a row of its group's tensors; resampling overwrites the
    contents of a row with those of another.

    A finished row keeps its weight too, and can still be a source or destination of resampling.
    """

    STATE_FIELDS = (*GroupRows.STATE_FIELDS, *WEIGHT_FIELDS)

    def __init__(
        self,
        shape: GroupShape,
        slots: int,
        max_tokens: int,
        device: torch.device | str = "cpu",
        resample: resampling.Resample = resampling.resample,
    ) -> None:
        g, self._resample = shape.max_groups, resample
        self.log_weights = torch.zeros(g, shape.rows, dtype=torch.float64, device=device)
        # log of the mean weight, summed over the resamplings; effective sample size, summed over the rounds
        self.log_z, self.ess = (torch.zeros(g, dtype=torch.float64, device=device) for _ in range(2))
        # number of rounds with a resampling, and of all rounds
        self.resampled, self.rounds = (torch.zeros(g, dtype=torch.int64, device=device) for _ in range(2))
        super().__init__(shape, slots, max_tokens, device)

    def _bind_views(self) -> None:
        super()._bind_views()
        self._weighed = resampling.ResamplingState(
            log_weights=self.log_weights,
            mask=self.mask,
            ends=self._ends,
            path=self._path,
            log_z=self.log_z,
            ess=self.ess,
            resampled=self.resampled,
            rounds=self.rounds,
        )

    def open(self, group: int, token: int, position: int, limit: int) -> None:
        """Fans out the N particles of a group from a prompt; parameters as in `GroupRows.open`."""
        super().open(group, token, position, limit)
        for name in WEIGHT_FIELDS:
            getattr(self, name)[group].zero_()

    def reset_idle(self, groups: slice) -> None:
        """See `GroupRows.reset_idle`. Resets the round counts too."""
        super().reset_idle(groups)
        self.rounds[groups] = 0

    def append_weighted(
        self, drafts: Tensor, accepted: Tensor, bonus: Tensor, terms: Tensor, stops: Tensor, width: int
    ) -> None:
        """Appends a round as `GroupRows.append_round` does, and adds the log-weights of the new tokens. `terms`:
        [groups, N, K + 1], log-weight of each new token; entry `accepted` is that of `bonus`, later entries are
        ignored."""
        counts = self.append_round(drafts, accepted, bonus, stops, width)
        self.log_weights += torch.where(counts, terms, 0).sum(-1)

    def resample(self, threshold: float, uniform: Tensor, width: int) -> None:
        """Resamples each group whose effective sample size is below `threshold` * N.

        `uniform`: [groups], the uniform number of each group's systematic resampling.
        `width`: number of tree slots in use.
        """
        self._resample(self._weighed, uniform, threshold, width)

    def log_evidence(self) -> Tensor:
        """Returns the estimates [groups] of log Z (smc/weights.py)."""
        return self.log_z + self._log_mean()

    def _log_mean(self) -> Tensor:
        """Returns the logarithms [groups] of the mean weight."""
        return self.log_weights.logsumexp(-1) - math.log(self.count)
