"""Verification of a round's draft tokens: the number of accepted tokens, the token after them, and the weights.

This is where rounds of mode smc and of exact batching differ. In mode smc, particles are weighted as described in
smc/weights.py, and some of their tokens may be verified. In exact batching, every group has one particle; its chain is
verified by smc/chain_verification.py and has no weight.

Shapes: `groups` is the number of groups that share a logits processor; N particles per group, K draft tokens per round,
V tokens in the vocabulary.
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
    """The draft tokens of a round, and the noise for their verification and for the token after them."""

    tokens: Tensor  # [groups, N, K]
    log_q: Tensor  # [groups, N, K], log-probabilities of the tokens under q
    logits: list[Tensor]  # the draft's processed logits [groups * N, V] of each step that may be rejected
    keys: list[Tensor | None]  # noise keys [groups * N]: of each token (coupled chains only), then of the token after
    uniforms: Callable[[], Tensor]  # returns [groups, N, tokens verified by rejection sampling], uniform in (0, 1)


@dataclass(frozen=True, slots=True)
class RoundVerdict:
    """Result of the verification of a round."""

    accepted: Tensor  # [groups, N], number of leading draft tokens that are kept
    bonus: Tensor  # [groups, N], the token after those; -1 if logits are not finite
    log_weight_increments: Tensor  # [groups, N, K + 1], log-weight of each kept token and of `bonus`, by position


def verify_round(
    processor: LogitsProcessor, config: PopulationConfig, logits: Tensor, drafted: DraftedTokens
) -> RoundVerdict:
    """Verifies the draft tokens of groups that share a logits processor. `logits`: the target's, [groups, K + 1, N, at
    least V], raw or with penalties applied."""
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
    """Accepts the draft tokens before the first one that differs from the token of autoregressive decoding."""
    keys = [each for each in drafted.keys if each is not None]
    rows = logits.transpose(1, 2).flatten(0, 2)  # ordered by group, then by step
    best = processor.draw_autoregressive(rows, torch.stack(keys, 1).flatten(0, 1) if keys else None)
    tokens = drafted.tokens.flatten(0, 1)
    return _without_weights(chain_verification.accept_matching_prefix(best.view(len(tokens), -1), tokens), drafted)


def _verify_by_rejection(processor: LogitsProcessor, logits: Tensor, drafted: DraftedTokens) -> RoundVerdict:
    """Accepts draft tokens by rejection sampling."""
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
    """Accepts all draft tokens and weights them: mode smc, with neither filters nor exactly verified tokens."""
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
    """Accepts the draft tokens before the first one that fails exact verification or the target's filters, and weights
    the new tokens. A row is a particle; rows are ordered by group."""
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
    """Returns the noise keys [groups * N] of the token after the accepted draft tokens."""
    keys = drafted.keys[-1]
    assert keys is not None
    return keys


def _bonus_noise(drafted: DraftedTokens, logits: Tensor) -> Tensor:
    """Returns the Gumbel noise [groups * N, V] of the token after the accepted draft tokens, for logits [..., V]."""
    keys = _bonus_keys(drafted)
    return gumbel(row_bits(keys, counters(range(logits.shape[-1]), keys.device)), logits.dtype)


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
