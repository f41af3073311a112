"""What a group of particles ends with: its texts and their weights, one of which is the answer.

Letters: N particles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from swiftspec.smc import weights


@dataclass(frozen=True, slots=True)
class Particle:
    """One of the texts that a group ends with, and its share of the weight."""

    tokens: tuple[int, ...]
    stopped: bool  # by a stop token
    weight: float


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The particle that was picked, and what became of its group."""

    tokens: list[int]
    stopped: bool  # by a stop token
    coalesced_prefix: int  # tokens that all particles shared in the end
    ess_mean: float  # particles' worth of weight, mean over the rounds
    resample_rate: float  # share of the rounds
    log_z: float  # estimate of the power target's log-normaliser
    full: bool  # the cache had no room for another round
    compactions: int
    moved_slots: int  # by compactions; fan-out and resampling move none
    particles: tuple[Particle, ...] = ()  # all of them; their weights add up to 1
    uniform: float = 0.5  # in (0, 1), what the particle was picked by

    def choices(self, count: int, considered: int | None = None) -> list[Particle]:
        """Up to `count` different texts in place of all, the heaviest first; copies of one text are one, and fewer come
        where there are no more. On average over seeds each text weighs what it does in the population (`thinned` in
        smc/weights.py). With more `considered` than `count` so many are drawn, of which the heaviest are left: these
        are not like the population any more, and their weights say how much of it they are.
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
