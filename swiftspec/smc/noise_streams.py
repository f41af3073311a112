"""Noise streams of a population: those of its rows, and the numbers that resample a group and pick its answer."""

from __future__ import annotations

import torch
from torch import Tensor

from swiftspec.backends.reference.noise import stream_key
from swiftspec.batching.noise_streams import RowStreams, StreamPurpose, stream_of


class ParticleStreams(RowStreams):
    """Noise of the particles of several groups. Resampling and the choice of the answer use uniform numbers that are
    drawn when a request opens."""

    def __init__(self, groups: int, particles: int, device: torch.device | str, rounds: int = 1) -> None:
        """`rounds`: the maximum number of rounds of a request."""
        super().__init__(groups, particles, device)
        # uniform numbers: for the resampling of each round, then for picking the answer
        self.drawn = torch.empty(groups, rounds + 1, dtype=torch.float64, device=device)
        self._rounds = torch.arange(rounds, device=device)
        for group in range(groups):
            self._draw(group, 0)

    @property
    def state(self) -> list[Tensor]:
        """The tensors that hold the noise keys and numbers; their first dimension is the group."""
        return [*super().state, self.drawn]

    def seed(self, group: int, seed: int) -> None:
        """See `RowStreams.seed`."""
        super().seed(group, seed)
        self._draw(group, seed)

    def _draw(self, group: int, seed: int) -> None:
        keys = [stream_key(seed, stream_of(row, StreamPurpose.POPULATION)) for row in range(2)]
        resampling, pick = torch.tensor(keys, dtype=torch.uint32).view(torch.int32).to(self._rounds.device)
        # all rounds together: one call costs no more than a single number
        self.drawn[group, :-1] = self._uniform(resampling, self._rounds)
        # at clock 0, whatever the number of rounds: the host may launch one more round before it knows of the end
        self.drawn[group, -1] = self._uniform(pick, self._rounds[:1])[0]

    def resampling(self, rounds: Tensor) -> Tensor:
        """Returns the uniform number [groups] with which systematic resampling resamples each of the first groups.
        `rounds`: [groups], the number of rounds that each group has completed."""
        return self.drawn[: len(rounds)].gather(1, rounds[:, None]).squeeze(1)

    def pick(self, group: int) -> float:
        """Returns the uniform number that picks the answer of a group."""
        return float(self.drawn[group, -1])
