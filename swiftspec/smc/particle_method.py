"""Mode smc as a way to decode sequence groups: N weighted particles per group (smc/weights.py derives the
distribution)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from swiftspec.backends.reference import resampling
from swiftspec.batching.group_method import DraftedTokens
from swiftspec.batching.group_spans import GroupSpan
from swiftspec.batching.sequence_group import SequenceGroup
from swiftspec.config import NativeRoundParams, PopulationConfig
from swiftspec.params import SamplingParams
from swiftspec.sampling.row_sampler import RowSampler
from swiftspec.smc import weights
from swiftspec.smc.group_result import GroupResult, Particle
from swiftspec.smc.noise_streams import ParticleStreams
from swiftspec.smc.particles import Particles
from swiftspec.smc.verification import WeightedVerdict, verify_particles


class ParticleMethod:
    """The `GroupMethod` of mode smc."""

    exact = False

    def __init__(
        self,
        config: PopulationConfig,
        slots: int,
        max_tokens: int,
        device: torch.device | str,
        resample: resampling.Resample = resampling.resample,
    ) -> None:
        """`slots`: tree slots of each group. `max_tokens`: maximum length of an answer. `resample`: the operator of the
        target's backend."""
        shape = self.shape = config.shape
        self._config = config
        self.rows = Particles(shape, slots, max_tokens, device, resample)
        # every round adds at least one token, so there are at most max_tokens rounds
        self.streams = ParticleStreams(shape.max_groups, shape.rows, device, max_tokens)

    @property
    def native_params(self) -> NativeRoundParams | None:
        """See `GroupMethod.native_params`. Native rounds do not verify the first tokens of a round exactly."""
        config = self._config
        if config.smc_exact > 0:
            return None
        return NativeRoundParams(
            config.smc_draft_tokens, "weigh", config.power, config.ess_threshold, config.deferred_bonus
        )

    def may_reject(self, sampling: SamplingParams) -> bool:
        """See `GroupMethod.may_reject`."""
        return sampling.filtered or self._config.smc_exact > 0

    def noise_keys(self, rows: Particles, spans: Sequence[GroupSpan]) -> Iterator[Tensor | None]:
        """See `GroupMethod.noise_keys`."""
        return self.streams.round_keys(rows.clock[:, None] + rows.steps)

    def draw(self, sampler: RowSampler, logits: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `GroupMethod.draw`."""
        assert keys is not None
        tokens, log_probs = sampler.draw(logits, keys)
        return tokens.clamp_min_(0), log_probs  # -1 marks logits that are not finite: the weight is NaN

    def keeps_logits(self, sampler: RowSampler, step: int) -> bool:
        """See `GroupMethod.keeps_logits`."""
        return sampler.filtered or step < self._config.smc_exact

    def verify(self, sampler: RowSampler, logits: Tensor, drafted: DraftedTokens) -> WeightedVerdict:
        """See `GroupMethod.verify`."""
        return verify_particles(sampler, self._config, logits, drafted)

    def append(self, rows: Particles, drafts: Tensor, verdict: WeightedVerdict, stops: Tensor, width: int) -> None:
        """See `GroupMethod.append`. Resamples each group whose effective sample size is too low."""
        terms = verdict.log_weight_increments
        rows.append_weighted(drafts, verdict.accepted, verdict.bonus.clamp_min(0), terms, stops, width)
        rows.resample(self._config.ess_threshold, self.streams.resampling(rows.rounds), width)

    def pick(self, group: SequenceGroup, place: int) -> GroupResult:
        """See `GroupMethod.pick`: draws one of the particles by its weight."""
        p, rounds = self.rows, max(group.rounds, 1)
        uniform, lengths = self.streams.pick(place), p.length[place].tolist()
        row, shares = weights.pick_particle(p.log_weights[place].tolist(), uniform)
        texts = zip(p.tokens[place, :, : max(lengths)].tolist(), lengths, strict=True)
        found = zip(texts, p.stopped[place].tolist(), shares, strict=True)
        particles = tuple(Particle(tuple(text[:n]), stopped, share) for (text, n), stopped, share in found)
        return GroupResult(
            tokens=[*particles[row].tokens],
            stopped=particles[row].stopped,
            coalesced_prefix=len(group.tokens),
            ess_mean=float(p.ess[place]) / rounds,
            resample_rate=int(p.resampled[place]) / rounds,
            log_z=float(p.log_evidence()[place]),
            full=group.full,
            compactions=group.compactions,
            moved_slots=group.moved_slots,
            particles=particles,
            uniform=uniform,
        )
