"""The result of a sequence group: its texts and their weights, one of which is the answer.

Symbol: N particles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from swiftspec.smc import weights


@dataclass(frozen=True, slots=True)
class Particle:
    """One of the texts of a finished group, and its share of the weight."""

    tokens: tuple[int, ...]
    stopped: bool  # by a stop token
    weight: float


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The particle that was picked, and statistics of its group."""

    tokens: list[int]
    stopped: bool  # by a stop token
    coalesced_prefix: int  # tokens that all particles shared at the end
    ess_mean: float  # effective sample size, mean over the rounds
    resample_rate: float  # share of rounds with a resampling
    log_z: float  # estimate of the power target's log-normaliser
    full: bool  # the cache had no room for another round
    compactions: int
    moved_slots: int  # by compactions; fan-out and resampling move no KV
    particles: tuple[Particle, ...] = ()  # all of them; their weights add up to 1
    uniform: float = 0.5  # in (0, 1), the number by which the particle was picked

    def choices(self, count: int, considered: int | None = None) -> list[Particle]:
        """Up to `count` different texts that represent all N, in order of descending weight. Copies of a text are
        merged, so there may be fewer. Averaged over seeds, each text's weight equals its weight in the population
        (`thin_weights` in smc/weights.py).

        With `considered` > `count`, that many are drawn and the `count` heaviest of them are returned. These no longer
        represent the population; their weights show which part of it they are.
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
