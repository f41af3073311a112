"""The result of a group of particles: the texts of its particles, one of which is the answer, and their weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from swiftspec.smc import weights


@dataclass(frozen=True, slots=True)
class Particle:
    """The text of one particle of a finished group, and its weight."""

    tokens: tuple[int, ...]
    stopped: bool  # by a stop token
    weight: float  # normalised: the weights of a group add up to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """The answer of a sequence group, which is the text of the particle that was picked, and statistics of the
    group."""

    tokens: list[int]
    stopped: bool  # by a stop token
    full: bool  # the group ended because its tree region had no room for another round
    compactions: int  # number of compactions of its tree region
    moved_slots: int  # slots whose KV compactions moved; fan-out and resampling move no KV
    coalesced_prefix: int  # number of leading tokens that all particles share
    ess_mean: float  # effective sample size, mean over the rounds
    resample_rate: float  # share of rounds with a resampling
    log_z: float  # estimate of log Z, the log-normaliser of the power target (smc/weights.py)
    particles: tuple[Particle, ...] = ()  # all of them; their weights add up to 1
    uniform: float = 0.5  # uniform number in (0, 1) by which the answer was picked

    def choices(self, count: int, considered: int | None = None) -> list[Particle]:
        """Returns up to `count` different texts that represent the population, in order of descending weight.

        Particles with equal texts are merged first, so there may be fewer than `count`. If there are more texts than
        `considered`, some are drawn at random and weighted anew (`thin_weights` in smc/weights.py): averaged over
        seeds, a text's weight, 0 if it is not drawn, is its weight in the population.

        `considered`: number of texts to draw, of which the `count` heaviest are returned; default `count`. If it is
        larger, the weight of the other texts is dropped: the sum of the returned weights is then the share of the
        population that they stand for.
        """
        whole = dict[tuple[int, ...], Particle]()
        for each in self.particles:
            known = whole.get(each.tokens)
            whole[each.tokens] = each if known is None else replace(each, weight=known.weight + each.weight)
        texts = [each for each in whole.values() if each.weight > 0]
        shares = torch.tensor([each.weight for each in texts], dtype=torch.float64)
        drawn = weights.thin_weights(shares, considered or count, self.uniform).tolist()
        left = [replace(each, weight=weight) for each, weight in zip(texts, drawn, strict=True) if weight > 0]
        return sorted(left, key=lambda each: -each.weight)[:count]
