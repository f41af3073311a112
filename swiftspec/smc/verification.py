"""Verification of a round's draft tokens: the number of accepted tokens, the token after them, and the weights.

This is where the two kinds of rounds differ. Particles are weighted as described in smc/weights.py, and some of their
tokens may be verified; chains, one particle per group, are verified as a whole by smc/chain_verification.py and have no
weights.

Symbols: A groups of N particles that share a logits processor, K draft tokens per round, E of them verified, V tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from swiftspec.backends.reference.noise import counters, gumbel, row_bits
from swiftspec.backends.reference.sampling import argmax_token
from swiftspec.config import PopulationConfig
from swiftspec.sampling import filters
from swiftspec.smc import chain_verification, weights
from swiftspec.smc.logits_processor import LogitsProcessor


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    """The draft's tokens of a round, and the noise of the token after them."""

    tokens: Tensor  # [A, N, K]
    log_q: Tensor  # [A, N, K]
    logits: list[Tensor]  # [A N, V] each: the draft's at the steps that may be rejected, shaped
    keys: list[Tensor | None]  # [A N] of the noise of the token after them; of theirs before it, where chains match
    uniforms: Callable[[], Tensor]  # [A, N, E], where the first tokens are verified; all are of rejected chains


@dataclass(frozen=True, slots=True)
class RoundVerdict:
    """The outcome of a round. `accepted`: number of leading draft tokens that are kept; `terms`: log-weights by
    position."""

    accepted: Tensor  # [A, N]
    bonus: Tensor  # [A, N]
    terms: Tensor  # [A, N, K + 1]


def verify_round(
    processor: LogitsProcessor, config: PopulationConfig, logits: Tensor, drafted: DraftedTokens
) -> RoundVerdict:
    """Verifies a round by the target's raw logits [A, K + 1, N, >= V]."""
    if config.chains is not None:
        return (
            _verify_coupled(processor, logits, drafted)
            if config.chains == "match"
            else _verify_by_rejection(processor, logits, drafted)
        )
    if processor.filtered or config.smc_exact > 0:
        return _accept_part(processor, config, logits, drafted)
    return _accept_all(processor, config.power, logits, drafted)


def _verify_coupled(processor: LogitsProcessor, logits: Tensor, drafted: DraftedTokens) -> RoundVerdict:
    """Accepts tokens as long as they equal those of autoregressive decoding."""
    keys = [each for each in drafted.keys if each is not None]
    rows = logits.transpose(1, 2).flatten(0, 2)  # ordered by group, then by step
    best = processor.draw_autoregressive(rows, torch.stack(keys, 1).flatten(0, 1) if keys else None)
    tokens = drafted.tokens.flatten(0, 1)
    return _without_weights(chain_verification.accept_matching_prefix(best.view(len(tokens), -1), tokens), drafted)


def _verify_by_rejection(processor: LogitsProcessor, logits: Tensor, drafted: DraftedTokens) -> RoundVerdict:
    """Rejection sampling."""
    groups, steps, particles, _ = logits.shape
    target = processor.target(logits.transpose(1, 2).flatten(0, 2)).view(groups * particles, steps, -1)
    tokens, uniforms = drafted.tokens.flatten(0, 1), drafted.uniforms().flatten(0, 1)
    found = chain_verification.verify_by_rejection(
        target, torch.stack(drafted.logits, 1), tokens, uniforms, _bonus_noise(drafted, target)
    )
    last = target.gather(1, found.count[:, None, None].expand(-1, 1, target.shape[-1]))
    bonus = torch.where(last.isnan().flatten(1).any(-1), -1, found.bonus)
    return _without_weights(chain_verification.ChainVerdict(found.accepted, found.count, bonus), drafted)


def _without_weights(found: chain_verification.ChainVerdict, drafted: DraftedTokens) -> RoundVerdict:
    shape = drafted.tokens.shape[:2]
    terms = torch.zeros(*shape, drafted.tokens.shape[2] + 1, dtype=torch.float64, device=found.count.device)
    return RoundVerdict(found.count.view(shape), found.bonus.view(shape), terms)


def _accept_all(processor: LogitsProcessor, power: float, logits: Tensor, drafted: DraftedTokens) -> RoundVerdict:
    """Accepts all draft tokens."""
    groups, particles, steps = drafted.tokens.shape
    ahead, last = (part.reshape(-1, logits.shape[-1]) for part in (logits[:, :-1], logits[:, -1]))
    log_p = processor.log_probs(ahead, drafted.tokens.transpose(1, 2).flatten())
    log_p = log_p.view(groups, steps, particles).transpose(1, 2)
    bonus, _ = processor.draw(last, _bonus_keys(drafted), power)
    norm = torch.zeros_like(drafted.log_q[..., :1])
    if power != 1:
        shaped = processor.tempered(last)
        norm = weights.log_normaliser(shaped, shaped.logsumexp(-1), power).view_as(norm)
    bonus = bonus.view(groups, particles)
    return RoundVerdict(torch.full_like(bonus, steps), bonus, torch.cat((power * log_p - drafted.log_q, norm), -1))


def _accept_part(
    processor: LogitsProcessor, config: PopulationConfig, logits: Tensor, drafted: DraftedTokens
) -> RoundVerdict:
    """Draft tokens may be rejected. Rows are ordered by particle: R = A N."""
    power, exact = config.power, config.smc_exact
    groups, step, particles, _ = logits.shape
    logits = processor.target(logits.flatten(0, 2)).view(groups, step, particles, -1).transpose(1, 2).flatten(0, 1)
    tokens, log_q = drafted.tokens.flatten(0, 1), drafted.log_q.flatten(0, 1)
    whole = logits.logsumexp(-1)
    norms = weights.log_normaliser(logits, whole, power)
    terms = power * weights.log_prob(logits[:, :-1], whole[:, :-1], tokens) - log_q
    draft = torch.stack(drafted.logits, 1)
    if processor.filtered:
        terms = terms + weights.log_mass_inside(logits[:, :-1], draft)
    accepted, scores = _reject_drafts(config, logits, draft, drafted)
    terms = torch.cat((norms[:, :exact], terms[:, exact:], norms[:, -1:]), 1)
    terms = terms.scatter(1, accepted[:, None], norms.gather(1, accepted[:, None]))
    bonus, shape = argmax_token(scores + _bonus_noise(drafted, scores)), (groups, particles)
    return RoundVerdict(accepted.view(shape), bonus.view(shape), terms.view(*shape, -1))


def _bonus_keys(drafted: DraftedTokens) -> Tensor:
    """The noise keys [A N] of the token after the draft's."""
    keys = drafted.keys[-1]
    assert keys is not None
    return keys


def _bonus_noise(drafted: DraftedTokens, logits: Tensor) -> Tensor:
    """The noise [A N, V] of the token after the draft's, for logits [..., V]."""
    keys = _bonus_keys(drafted)
    return gumbel(row_bits(keys, counters(range(logits.shape[-1]), keys.device)), logits.dtype)


def _reject_drafts(
    config: PopulationConfig, logits: Tensor, draft: Tensor, drafted: DraftedTokens
) -> tuple[Tensor, Tensor]:
    """The number of accepted draft tokens [R], and the scores [R, V] of the token after them, given processed logits
    [R, K + 1, V] of the target and [R, K or E, V] of the draft.

    The first `smc_exact` tokens are verified; the others must only pass the target's filters.
    """
    power, exact, tokens = config.power, config.smc_exact, drafted.tokens.flatten(0, 1)
    stays = logits[:, :-1].gather(-1, tokens.unsqueeze(-1)).squeeze(-1) > filters.NEG_INF
    if exact:
        uniforms = drafted.uniforms().flatten(0, 1)
        verified = weights.accept_drafts(logits[:, :exact], draft[:, :exact], tokens[:, :exact], uniforms, power)
        stays = torch.cat((verified, stays[:, exact:]), 1)
    accepted = stays.cumprod(1).sum(1)
    at = accepted[:, None, None].expand(-1, 1, logits.shape[-1])
    target = logits.gather(1, at).squeeze(1)
    if not exact:
        return accepted, power * target
    rest = weights.log_residual(target, draft.gather(1, at.clamp_max(draft.shape[1] - 1)).squeeze(1), power)
    return accepted, torch.where((accepted < exact)[:, None], rest, power * target)
