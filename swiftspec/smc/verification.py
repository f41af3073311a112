"""Verification of a round's particles: the number of accepted tokens, the token after them, and the weights
(smc/weights.py).

Shapes: `groups` is the number of groups that share a sampler; N particles per group, K draft tokens per round,
V tokens in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from swiftspec.backends.reference.noise import counters, gumbel, row_bits
from swiftspec.backends.reference.sampling import argmax_token
from swiftspec.config import PopulationConfig
from swiftspec.sampling import filters
from swiftspec.smc import weights
from swiftspec.smc.group_spans import concatenate
from swiftspec.smc.row_sampler import RowSampler


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    """The draft tokens of a round, and the noise for their verification and for the token after them."""

    tokens: Tensor  # [groups, N, K]
    log_q: Tensor  # [groups, N, K], log-probabilities of the tokens under q
    logits: list[Tensor]  # the draft's processed logits [groups * N, V] of each step that may be rejected
    bonus_keys: Tensor  # [groups * N], noise keys of the token after the draft tokens
    uniforms: Callable[[int], Tensor]  # returns uniform numbers in (0, 1) for the first n tokens, [groups, N, n]


@dataclass(frozen=True, slots=True)
class WeightedVerdict:
    """Result of the verification of a round of particles."""

    accepted: Tensor  # [groups, N], number of leading draft tokens that are kept
    bonus: Tensor  # [groups, N], the token after those; -1 if logits are not finite
    log_weight_increments: Tensor  # [groups, N, K + 1], log-weight of each kept token and of `bonus`, by position

    def not_finite(self) -> Tensor:
        """Returns whether the logits or weights of a group are not finite, [groups] bool."""
        return (self.bonus < 0).any(-1) | self.log_weight_increments.isnan().flatten(1).any(-1)


def join_verdicts(parts: Sequence[WeightedVerdict]) -> WeightedVerdict:
    """Returns the verdict of consecutive spans of groups."""
    return WeightedVerdict(*(concatenate([getattr(part, each.name) for part in parts]) for each in fields(parts[0])))


def keeps_logits(sampler: RowSampler, config: PopulationConfig, step: int) -> bool:
    """Returns whether the verification of a draft step needs the draft's logits."""
    return sampler.filtered or step < config.smc_exact


def verify_particles(
    sampler: RowSampler, config: PopulationConfig, logits: Tensor, drafted: DraftedTokens
) -> WeightedVerdict:
    """Verifies the draft tokens of groups that share a sampler. `logits`: the target's, [groups, K + 1, N, at
    least V], raw or with penalties applied."""
    if sampler.filtered or config.smc_exact > 0:
        return _accept_part(sampler, config, logits, drafted)
    return _accept_all(sampler, config.power, logits, drafted)


def _accept_all(sampler: RowSampler, power: float, logits: Tensor, drafted: DraftedTokens) -> WeightedVerdict:
    """Accepts all draft tokens and weights them, with neither filters nor exactly verified tokens."""
    groups, particles, steps = drafted.tokens.shape
    ahead, last = (part.reshape(-1, logits.shape[-1]) for part in (logits[:, :-1], logits[:, -1]))
    log_p = sampler.log_probs(ahead, drafted.tokens.transpose(1, 2).flatten())
    log_p = log_p.view(groups, steps, particles).transpose(1, 2)
    bonus, _ = sampler.draw(last, drafted.bonus_keys, power)
    norm = torch.zeros_like(drafted.log_q[..., :1])
    if power != 1:
        shaped = sampler.tempered(last)
        norm = weights.log_normaliser(shaped, shaped.logsumexp(-1), power).view_as(norm)
    bonus = bonus.view(groups, particles)
    return WeightedVerdict(torch.full_like(bonus, steps), bonus, torch.cat((power * log_p - drafted.log_q, norm), -1))


def _accept_part(
    sampler: RowSampler, config: PopulationConfig, logits: Tensor, drafted: DraftedTokens
) -> WeightedVerdict:
    """Accepts the draft tokens before the first one that fails exact verification or the target's filters, and weights
    the new tokens. A row is a particle; rows are ordered by group."""
    power, exact = config.power, config.smc_exact
    groups, step, particles, _ = logits.shape
    logits = sampler.target(logits.flatten(0, 2)).view(groups, step, particles, -1).transpose(1, 2).flatten(0, 1)
    tokens, log_q = drafted.tokens.flatten(0, 1), drafted.log_q.flatten(0, 1)
    whole = logits.logsumexp(-1)
    norms = weights.log_normaliser(logits, whole, power)
    terms = power * weights.log_prob(logits[:, :-1], whole[:, :-1], tokens) - log_q
    draft = torch.stack(drafted.logits, 1)
    if sampler.filtered:
        terms = terms + weights.log_mass_inside(logits[:, :-1], draft)
    accepted, scores = _reject_drafts(config, logits, draft, drafted)
    terms = torch.cat((norms[:, :exact], terms[:, exact:], norms[:, -1:]), 1)
    terms = terms.scatter(1, accepted[:, None], norms.gather(1, accepted[:, None]))
    bonus, shape = argmax_token(scores + _bonus_noise(drafted, scores)), (groups, particles)
    return WeightedVerdict(accepted.view(shape), bonus.view(shape), terms.view(*shape, -1))


def _bonus_noise(drafted: DraftedTokens, logits: Tensor) -> Tensor:
    """Returns the Gumbel noise [groups * N, V] of the token after the accepted draft tokens, for logits [..., V]."""
    tokens = counters(range(logits.shape[-1]), drafted.bonus_keys.device)
    return gumbel(row_bits(drafted.bonus_keys, tokens), logits.dtype)


def _reject_drafts(
    config: PopulationConfig, logits: Tensor, draft: Tensor, drafted: DraftedTokens
) -> tuple[Tensor, Tensor]:
    """Returns the number of accepted draft tokens [rows], and the scores [rows, V] of the token after them. The first
    `smc_exact` tokens are verified; the others must only pass the target's filters.

    `logits`: the target's processed logits [rows, K + 1, V].
    `draft`: the draft's processed logits [rows, steps, V] of the first steps: `smc_exact` or, with filters, all K.
    """
    power, exact, tokens = config.power, config.smc_exact, drafted.tokens.flatten(0, 1)
    stays = logits[:, :-1].gather(-1, tokens.unsqueeze(-1)).squeeze(-1) > filters.NEG_INF
    if exact:
        uniforms = drafted.uniforms(exact).flatten(0, 1)
        verified = weights.accept_drafts(logits[:, :exact], draft[:, :exact], tokens[:, :exact], uniforms, power)
        stays = torch.cat((verified, stays[:, exact:]), 1)
    accepted = stays.cumprod(1).sum(1)
    at = accepted[:, None, None].expand(-1, 1, logits.shape[-1])
    target = logits.gather(1, at).squeeze(1)
    if not exact:
        return accepted, power * target
    rest = weights.log_residual(target, draft.gather(1, at.clamp_max(draft.shape[1] - 1)).squeeze(1), power)
    return accepted, torch.where((accepted < exact)[:, None], rest, power * target)
