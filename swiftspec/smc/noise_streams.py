"""Noise streams of a population: one per particle and purpose, with keys on the device.

The noise bits equal those of `noise_bits` in backends/reference/noise.py and of csrc/common/noise.h. These take
positions from the host; here the position is a tensor, so that a round draws its noise without the host.

The clock of a group counts draws, K + 1 per round, and never decreases. Without rejections every row grows by K + 1
tokens per round, and the clock is the absolute position. Where tokens may be rejected, rows differ in length:
resampling may overwrite a particle with a shorter one, which then reaches positions at which its row has drawn before.
Noise that depends on the position would repeat there and be correlated with that resampling; noise that depends on the
clock does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

import torch
from torch import Tensor

from swiftspec.backends.reference.noise import counters, row_bits, row_keys, stream_key

STREAMS_PER_ROW = 4  # streams reserved per particle
FIRST_ROW_STREAM = 16  # streams 0..15 belong to the request as a whole; 0 is the target's


class StreamPurpose(IntEnum):
    """Uses of the noise of a row; each has its own stream."""

    DRAFT = 0  # the draft's tokens
    BONUS = 1  # the bonus token, or the residual sample after a rejection
    COIN = 2  # acceptance tests of rejection sampling
    POPULATION = 3  # for all particles of a group: resampling (row 0's stream), picking the answer (row 1's)


ROW_PURPOSES = (StreamPurpose.DRAFT, StreamPurpose.BONUS, StreamPurpose.COIN)  # those whose keys are on the device


def stream_of(row: int, purpose: StreamPurpose) -> int:
    """Returns the number of a row's noise stream, as `row_key` in backends/reference/noise.py takes it."""
    return FIRST_ROW_STREAM + STREAMS_PER_ROW * row + purpose


class ParticleStreams:
    """Noise of the particles of several groups, one request each. The noise of a group depends on the seed of its
    request only, not on its position among the groups. Resampling and the choice of the answer use uniform numbers that
    are drawn when a request opens."""

    def __init__(self, groups: int, particles: int, device: torch.device | str, rounds: int = 1) -> None:
        """`rounds`: the maximum number of rounds of a request."""
        self._keys = torch.empty(groups, len(ROW_PURPOSES), particles, dtype=torch.int32, device=device)
        # uniform numbers: for the resampling of each round, then for picking the answer
        self.drawn = torch.empty(groups, rounds + 1, dtype=torch.float64, device=device)
        self._rounds = torch.arange(rounds, device=device)
        self._first = counters(range(1), device)
        for group in range(groups):
            self.seed(group, 0)

    @property
    def state(self) -> list[Tensor]:
        """The tensors that hold the noise keys and numbers; their first dimension is the group."""
        return [self._keys, self.drawn]

    def seed(self, group: int, seed: int) -> None:
        """Sets the noise of a group for a request with this seed. Writes in place, because CUDA graphs read the
        tensors."""
        rows = range(self._keys.shape[-1])
        keys = [[stream_key(seed, stream_of(row, purpose)) for row in rows] for purpose in ROW_PURPOSES]
        self._keys[group].copy_(torch.tensor(keys, dtype=torch.uint32).view(torch.int32))
        shared = [stream_key(seed, stream_of(row, StreamPurpose.POPULATION)) for row in range(2)]
        resampling, pick = torch.tensor(shared, dtype=torch.uint32).view(torch.int32).to(self._rounds.device)
        # all rounds together: one call costs no more than a single number
        self.drawn[group, :-1] = self._uniform(resampling, self._rounds)
        # at clock 0, whatever the number of rounds: the host may launch one more round before it knows of the end
        self.drawn[group, -1] = self._uniform(pick, self._rounds[:1])[0]

    def round_keys(self, clock: Tensor) -> Iterator[Tensor]:
        """Yields the noise keys of a round of the first groups, [groups * N] for each draw: the K draft steps, then the
        bonus token. `clock`: [groups, K + 1], the clock of each draw."""
        groups, draws = clock.shape
        drafts, bonus = (self._keys[:groups, purpose] for purpose in (StreamPurpose.DRAFT, StreamPurpose.BONUS))
        streams = torch.cat((drafts.expand(draws - 1, -1, -1), bonus[None]))
        return iter(row_keys(streams, clock.t()[..., None]).flatten(1))

    def resampling(self, rounds: Tensor) -> Tensor:
        """Returns the uniform number [groups] with which systematic resampling resamples each of the first groups.
        `rounds`: [groups], the number of rounds that each group has completed."""
        return self.drawn[: len(rounds)].gather(1, rounds[:, None]).squeeze(1)

    def pick(self, group: int) -> float:
        """Returns the uniform number that picks the answer of a group."""
        return float(self.drawn[group, -1])

    def uniforms(self, clock: Tensor) -> Tensor:
        """Returns uniform numbers in (0, 1) for the acceptance tests of the first groups: [groups, N, draws] float64.
        `clock`: [groups, draws], the clock of each draw."""
        return self._uniform(self._keys[: len(clock), StreamPurpose.COIN, :, None], clock[:, None])

    def _uniform(self, streams: Tensor, clock: Tensor) -> Tensor:
        """Returns uniform float64 numbers in (0, 1), made of the noise bits of token 0. `streams`: stream keys.
        `clock`: the clock of each draw, which is broadcast with `streams`."""
        bits = row_bits(row_keys(streams, clock), self._first).squeeze(-1)
        return (bits.to(torch.float64) + 0.5) * 2.0**-32
