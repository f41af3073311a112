"""Noise for a population: a stream of its own for every particle and purpose, keyed on the device.

The integers are those of `noise.noise_bits` and csrc/noise.h. There the positions of a row are Python numbers; here
the clock is a tensor, so a round draws its noise without the host. Letters: N particles, V tokens.

The clock counts draws, K + 1 a round, and never goes back. In plain SMC every particle grows by K + 1 tokens a round,
and the clock is the absolute position. Where tokens may be rejected particles differ in length, so a row may come to a
position that it has drawn at before; the same noise there would remember why the row was overwritten.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from swiftspec.ops.noise import counters, gumbel, row_bits, row_keys, stream_key

BLOCK = 2**18  # noise made at a time
PER_PARTICLE = 4  # streams kept for each
FIRST_PARTICLE = 16  # stream 0 is the target's; those below this belong to the request as a whole


class Purpose(IntEnum):
    """What a particle draws, and what the population as a whole draws (from particle 0's side of the count)."""

    DRAFT = 0  # the draft's tokens
    EXTRA = 1  # the bonus token, or the residual's after a rejection
    COIN = 2  # exact verification
    POPULATION = 3  # resampling on particle 0's, the final pick on particle 1's


def stream_of(particle: int, purpose: Purpose) -> int:
    """The number of a stream, as `noise.row_key` takes it."""
    return FIRST_PARTICLE + PER_PARTICLE * particle + purpose


class Streams:
    """The noise of one request's population."""

    def __init__(self, seed: int, particles: int, vocab: int, device: torch.device | str) -> None:
        count = max(particles, 2)  # the population's own two streams are there for one particle too
        keys = [[stream_key(seed, stream_of(row, purpose)) for row in range(count)] for purpose in Purpose]
        self._keys = torch.tensor(keys, dtype=torch.uint32).view(torch.int32).to(device)  # [purposes, count]
        self._particles = particles
        self._tokens = counters(range(vocab), device)

    def gumbel(self, purpose: Purpose, clock: Tensor, dtype: torch.dtype) -> Tensor:
        """Standard Gumbel noise at `clock` [m]: [m, N, V]."""
        keys = row_keys(self._keys[purpose, : self._particles], clock[:, None])
        return gumbel(row_bits(keys, self._tokens), dtype)

    def block(self, steps: int) -> int:
        """How many of `steps` draws to make at a time: all of them where that is little memory, since fewer and larger
        operators cost less."""
        return min(steps, max(1, BLOCK // (self._particles * self._tokens.shape[0])))

    def coins(self, clock: Tensor) -> Tensor:
        """Uniform (0, 1) of each particle at each of `clock` [m]: [N, m] float64."""
        return self._uniform(self._keys[Purpose.COIN, : self._particles, None], clock)

    def resampling(self, clock: Tensor) -> Tensor:
        """The one uniform number [] that systematic resampling takes."""
        return self._uniform(self._keys[Purpose.POPULATION, 0], clock)

    def pick(self) -> Tensor:
        """The uniform number [] that chooses the answer, once a request: at clock 0, so that a round too many, begun
        before the host knew of the end, changes nothing."""
        return self._uniform(self._keys[Purpose.POPULATION, 1], torch.zeros_like(self._tokens[0]))

    def _uniform(self, streams: Tensor, clock: Tensor) -> Tensor:
        """Token 0's integers of these rows, as float64 in (0, 1)."""
        bits = row_bits(row_keys(streams, clock), self._tokens[:1]).squeeze(-1)
        return (bits.to(torch.float64) + 0.5) * 2.0**-32
