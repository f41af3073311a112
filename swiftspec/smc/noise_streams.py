"""Noise for a population: a stream of its own for every particle and purpose, keyed on the device.

The integers are those of `noise.noise_bits` and csrc/common/noise.h. There the positions of a row are Python numbers;
here the clock is a tensor, so a round draws its noise without the host. Letters: N particles.

The clock counts draws, K + 1 a round, and never goes back. In plain SMC every particle grows by K + 1 tokens a round,
and the clock is the absolute position. Where tokens may be rejected particles differ in length, so a row may come to a
position that it has drawn at before; the same noise there would remember why the row was overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

import torch
from torch import Tensor

from swiftspec.backends.reference.noise import counters, row_bits, row_keys, stream_key
from swiftspec.sampling.noise import TARGET_STREAM

STREAMS_PER_PARTICLE = 4  # streams kept for each
FIRST_PARTICLE_STREAM = 16  # stream 0 is the target's; those below this belong to the request as a whole


class StreamPurpose(IntEnum):
    """What a particle draws, and what the population as a whole draws (from particle 0's side of the count)."""

    DRAFT = 0  # the draft's tokens
    BONUS = 1  # the bonus token, or the residual's after a rejection
    COIN = 2  # exact verification
    POPULATION = 3  # resampling on particle 0's, the final pick on particle 1's


def stream_of(particle: int, purpose: StreamPurpose) -> int:
    """The number of a stream, as `noise.row_key` takes it."""
    return FIRST_PARTICLE_STREAM + STREAMS_PER_PARTICLE * particle + purpose


class ParticleStreams:
    """The noise of G groups, each one request's. A group's is that of its seed, wherever it stands among the others."""

    def __init__(self, groups: int, particles: int, device: torch.device | str, rounds: int = 1) -> None:
        """`rounds`: how many a request may have."""
        count = max(particles, 2)  # the population's own two streams are there for one particle too
        self._keys = torch.empty(groups, len(StreamPurpose), count, dtype=torch.int32, device=device)
        self._target = torch.empty(groups, dtype=torch.int32, device=device)  # keys of the streams of plain decoding
        self._particles, self._first = particles, counters(range(1), device)
        # for each round the number by which it resamples, and then the one that picks the answer
        self._drawn = torch.empty(groups, rounds + 1, dtype=torch.float64, device=device)
        self._rounds = torch.arange(rounds, device=device)
        for group in range(groups):
            self.seed(group, 0)

    @property
    def state(self) -> list[Tensor]:
        """What belongs to a group: [G, ...] each."""
        return [self._keys, self._target, self._drawn]

    def seed(self, group: int, seed: int) -> None:
        """Those of another request, in the same tensors."""
        count = self._keys.shape[-1]
        keys = [[stream_key(seed, stream_of(row, purpose)) for row in range(count)] for purpose in StreamPurpose]
        self._keys[group].copy_(torch.tensor(keys, dtype=torch.uint32).view(torch.int32))
        plain = torch.tensor([stream_key(seed, TARGET_STREAM)], dtype=torch.uint32)
        self._target[group : group + 1].copy_(plain.view(torch.int32))
        # one number a round: to make them all at once costs no more than to make one
        resampling, pick = self._keys[group, StreamPurpose.POPULATION, :2]
        self._drawn[group, :-1] = self._uniform(resampling, self._rounds)
        # at clock 0, so that a round too many, begun before the host knew of the end, changes nothing
        self._drawn[group, -1] = self._uniform(pick, self._rounds[:1])[0]

    def round_keys(self, clock: Tensor) -> Iterator[Tensor]:
        """Keys [A N] of a round of the first A groups, draw by draw at `clock` [A, K + 1]: the draft's, then the extra
        token's."""
        groups, draws = clock.shape
        drafts, bonus = (self._keys_of(purpose, groups) for purpose in (StreamPurpose.DRAFT, StreamPurpose.BONUS))
        streams = torch.cat((drafts.expand(draws - 1, -1, -1), bonus[None]))
        return iter(row_keys(streams, clock.t()[..., None]).flatten(1))

    def target_keys(self, positions: Tensor) -> Iterator[Tensor]:
        """Those by which plain decoding draws the tokens at `positions` [A, N, m]: m times [A N]."""
        keys = row_keys(self._target[: len(positions), None, None], positions)
        return iter(keys.flatten(0, 1).t().contiguous())

    def _keys_of(self, purpose: StreamPurpose, groups: int) -> Tensor:
        """Keys [A, N]."""
        return self._keys[:groups, purpose, : self._particles]

    def coins(self, clock: Tensor) -> Tensor:
        """Uniform (0, 1) of each particle of the first A groups at each of `clock` [A, m]: [A, N, m] float64."""
        return self._uniform(self._keys_of(StreamPurpose.COIN, len(clock))[..., None], clock[:, None])

    def resampling(self, rounds: Tensor) -> Tensor:
        """The one uniform number that systematic resampling takes in a round of each of the first A groups, by how many
        `rounds` [A] it has had: [A]."""
        return self._drawn[: len(rounds)].gather(1, rounds[:, None]).squeeze(1)

    def pick(self, group: int) -> float:
        """The uniform number that chooses the group's answer, once a request."""
        return float(self._drawn[group, -1])

    def _uniform(self, streams: Tensor, clock: Tensor) -> Tensor:
        """Token 0's integers of these rows, as float64 in (0, 1)."""
        bits = row_bits(row_keys(streams, clock), self._first).squeeze(-1)
        return (bits.to(torch.float64) + 0.5) * 2.0**-32
