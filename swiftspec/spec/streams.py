"""Noise for a population: a stream of its own for every particle and purpose, keyed on the device.

The integers are those of `sampler.noise_bits` and csrc/noise.h. There the positions of a row are Python numbers; here
the clock is a tensor, so a round draws its noise without the host. Letters: N particles, V tokens.

The clock counts draws, K + 1 a round, and never goes back. In plain SMC every particle grows by K + 1 tokens a round,
and the clock is the absolute position. Where tokens may be rejected particles differ in length, so a row may come to a
position that it has drawn at before; the same noise there would remember why the row was overwritten.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from swiftspec.spec.sampler import gumbel

GOLDEN = 0x9E3779B9 - 2**32
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
    """The number of a stream, as `sampler.row_key` takes it."""
    return FIRST_PARTICLE + PER_PARTICLE * particle + purpose


def mix_(x: Tensor) -> Tensor:
    """The hash of the noise on int32 tensors, in place; products wrap and the masks make the shifts logical."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


class Streams:
    """The noise of one request's population."""

    def __init__(self, seed: int, particles: int, vocab: int, device: torch.device | str) -> None:
        low, high = (torch.tensor(seed >> shift & 0xFFFFFFFF).to(torch.int32) for shift in (0, 32))
        request = mix_(mix_(low + GOLDEN) ^ high)
        count = max(particles, 2)  # the population's own two streams are there for one particle too
        streams = FIRST_PARTICLE + torch.arange(PER_PARTICLE * count, dtype=torch.int32)
        bases = mix_(request + streams * GOLDEN).view(count, PER_PARTICLE)
        self._bases = bases.t().contiguous().to(device)  # [PER_PARTICLE, count]
        self._particles = particles
        self._tokens = torch.arange(vocab, dtype=torch.int32, device=device) * GOLDEN

    def gumbel(self, purpose: Purpose, clock: Tensor, dtype: torch.dtype) -> Tensor:
        """Standard Gumbel noise at `clock` [m]: [m, N, V]."""
        keys = mix_(self._bases[purpose, : self._particles] ^ clock.to(torch.int32)[:, None])[..., None]
        bits = keys + self._tokens
        return gumbel(mix_(mix_(bits).bitwise_xor_(keys)).view(torch.uint32), dtype)

    def block(self, steps: int) -> int:
        """How many of `steps` draws to make at a time: all of them where that is little memory, since fewer and larger
        operators cost less."""
        return min(steps, max(1, BLOCK // (self._particles * self._tokens.shape[0])))

    def coins(self, clock: Tensor) -> Tensor:
        """Uniform (0, 1) of each particle at each of `clock` [m]: [N, m] float64."""
        keys = self._bases[Purpose.COIN, : self._particles, None] ^ clock.to(torch.int32)
        return _uniform(mix_(keys))

    def resampling(self, clock: Tensor) -> Tensor:
        """The one uniform number [] that systematic resampling takes."""
        return _uniform(mix_(self._bases[Purpose.POPULATION, 0] ^ clock.to(torch.int32)))

    def pick(self) -> Tensor:
        """The uniform number [] that chooses the answer, once a request: no clock, so that a round too many, begun
        before the host knew of the end, changes nothing."""
        return _uniform(mix_(self._bases[Purpose.POPULATION, 1].clone()))


def _uniform(keys: Tensor) -> Tensor:
    """Token 0's bits of rows with these keys, as float64 in (0, 1)."""
    bits = mix_(mix_(keys.clone()) ^ keys).view(torch.uint32)
    return (bits.to(torch.float64) + 0.5) * 2.0**-32
