"""Noise streams of a population: one per particle and purpose, keyed on the device.

The integers are those of `noise.noise_bits` and csrc/common/noise.h. There the positions are Python numbers; here the
clock is a tensor, so a round draws its noise without the host.

The clock counts draws, K + 1 per round, and never decreases. In plain SMC every particle grows by K + 1 tokens per
round, and the clock is the absolute position. Where tokens may be rejected, particles differ in length, and a row may
reach a position at which it has already drawn; the same noise there would be correlated with the resampling that
overwrote the row.

Symbol: N particles.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

import torch
from torch import Tensor

from swiftspec.backends.reference.noise import counters, row_bits, row_keys, stream_key
from swiftspec.sampling.noise import TARGET_STREAM

STREAMS_PER_PARTICLE = 4  # streams reserved per particle
FIRST_PARTICLE_STREAM = 16  # stream 0 is the target's; the others below belong to the request as a whole


class StreamPurpose(IntEnum):
    """What a particle draws, and what the population as a whole draws."""

    DRAFT = 0  # the draft's tokens
    BONUS = 1  # the bonus token, or the residual sample after a rejection
    COIN = 2  # exact verification
    POPULATION = 3  # resampling (on particle 0's stream) and the final pick (on particle 1's)


def stream_of(particle: int, purpose: StreamPurpose) -> int:
    """The number of a stream, as `noise.row_key` takes it."""
    return FIRST_PARTICLE_STREAM + STREAMS_PER_PARTICLE * particle + purpose


class ParticleStreams:
    """The noise of G groups, one request each. A group's noise depends on its seed only, not on its position."""

    def __init__(self, groups: int, particles: int, device: torch.device | str, rounds: int = 1) -> None:
        """`rounds`: the maximum number of rounds of a request."""
        count = max(particles, 2)  # the population needs two streams even with one particle
        self._keys = torch.empty(groups, len(StreamPurpose), count, dtype=torch.int32, device=device)
        self._target = torch.empty(groups, dtype=torch.int32, device=device)  # keys of the target's streams
        self._particles, self._first = particles, counters(range(1), device)
        # the resampling number of each round, then the number that picks the answer
        self._drawn = torch.empty(groups, rounds + 1, dtype=torch.float64, device=device)
        self._rounds = torch.arange(rounds, device=device)
        for group in range(groups):
            self.seed(group, 0)

    @property
    def state(self) -> list[Tensor]:
        """The tensors that belong to groups: [G, ...] each."""
        return [self._keys, self._target, self._drawn]

    def seed(self, group: int, seed: int) -> None:
        """Sets the streams of a new request, in the same tensors."""
        count = self._keys.shape[-1]
        keys = [[stream_key(seed, stream_of(row, purpose)) for row in range(count)] for purpose in StreamPurpose]
        self._keys[group].copy_(torch.tensor(keys, dtype=torch.uint32).view(torch.int32))
        plain = torch.tensor([stream_key(seed, TARGET_STREAM)], dtype=torch.uint32)
        self._target[group : group + 1].copy_(plain.view(torch.int32))
        # all rounds together: one call costs no more than a single number
        resampling, pick = self._keys[group, StreamPurpose.POPULATION, :2]
        self._drawn[group, :-1] = self._uniform(resampling, self._rounds)
        # at clock 0, so that a superfluous round, launched before the host knew of the end, changes nothing
        self._drawn[group, -1] = self._uniform(pick, self._rounds[:1])[0]

    def round_keys(self, clock: Tensor) -> Iterator[Tensor]:
        """Keys [A N] of a round of the first A groups, draw by draw at `clock` [A, K + 1]: the draft's tokens, then the
        bonus token."""
        groups, draws = clock.shape
        drafts, bonus = (self._keys_of(purpose, groups) for purpose in (StreamPurpose.DRAFT, StreamPurpose.BONUS))
        streams = torch.cat((drafts.expand(draws - 1, -1, -1), bonus[None]))
        return iter(row_keys(streams, clock.t()[..., None]).flatten(1))

    def target_keys(self, positions: Tensor) -> Iterator[Tensor]:
        """The keys with which autoregressive decoding samples the tokens at `positions` [A, N, m]: m times [A N]."""
        keys = row_keys(self._target[: len(positions), None, None], positions)
        return iter(keys.flatten(0, 1).t().contiguous())

    def _keys_of(self, purpose: StreamPurpose, groups: int) -> Tensor:
        """Keys [A, N]."""
        return self._keys[:groups, purpose, : self._particles]

    def uniforms(self, clock: Tensor) -> Tensor:
        """Uniform (0, 1) numbers of each particle of the first A groups at each of `clock` [A, m]: [A, N, m]
        float64."""
        return self._uniform(self._keys_of(StreamPurpose.COIN, len(clock))[..., None], clock[:, None])

    def resampling(self, rounds: Tensor) -> Tensor:
        """The uniform number of systematic resampling for a round of each of the first A groups, given the number of
        its previous `rounds` [A]: [A]."""
        return self._drawn[: len(rounds)].gather(1, rounds[:, None]).squeeze(1)

    def pick(self, group: int) -> float:
        """The uniform number that chooses the group's answer."""
        return float(self._drawn[group, -1])

    def _uniform(self, streams: Tensor, clock: Tensor) -> Tensor:
        """Token 0's integers of these rows, as float64 in (0, 1)."""
        bits = row_bits(row_keys(streams, clock), self._first).squeeze(-1)
        return (bits.to(torch.float64) + 0.5) * 2.0**-32
