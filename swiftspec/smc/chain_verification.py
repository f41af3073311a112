"""Verification of chains in batches: how many draft tokens of each request are accepted, and the bonus token.

`accept_matching_prefix` accepts tokens while they equal those that the target samples, `verify_by_rejection` is rejection sampling. Neither
branches or loops over rows. Both are exact for any sampling parameters: the caller has already applied temperature,
penalties, biases and filters to the logits, and forbidden tokens are -inf.

Letters: B requests, K draft tokens of each, V tokens. Tensors of other shapes raise ValueError.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RESIDUAL_FLOOR = 1e-30  # share of p in a residual: it decides only where rounding leaves nothing else


@dataclass(frozen=True, slots=True)
class ChainVerdict:
    """What became of B chains."""

    accepted: Tensor  # [B, K] bool, a prefix of each row
    count: Tensor  # [B] int64, how many
    bonus: Tensor  # [B] int64, the target's token after them


def verify_by_rejection(target: Tensor, draft: Tensor, tokens: Tensor, coins: Tensor, noise: Tensor) -> ChainVerdict:
    """Rejection sampling of tokens that were drawn from the draft: the output follows p, whatever q.

    `target` [B, K + 1, V] and `draft` [B, K, V] shaped logits of p and q; `tokens` [B, K] drawn from q; `coins` [B, K]
    uniform in (0, 1); `noise` [B, V] standard Gumbel. A token passes with min(1, p / q); the first that does not is
    replaced by one of norm(max(0, p - q)); after K that pass comes one of p. A draft row without a finite logit is a q
    of zeros. Arithmetic in float32, for float64 logits in float64. No probability of a whole [B, K, V] is materialised.
    Source: Leviathan et al. 2023, algorithm 1.
    """
    _check_shapes(tokens, target=(target, 1), draft=(draft, 0))
    if coins.shape != tokens.shape:
        raise ValueError(f"coins must be {list(tokens.shape)}, as the tokens are, not {list(coins.shape)}")
    steps, rows = tokens.shape[1], torch.arange(tokens.shape[0], device=tokens.device)
    kind = torch.float64 if target.dtype == torch.float64 else torch.float32
    log_p, log_q = (_log_probs(logits, tokens, kind) for logits in (target, draft))
    # where q is 0, nothing was drawn; the difference would be NaN for a p of 0
    passes = (coins.to(kind).log() < log_p - log_q) & (log_p > -torch.inf)
    accepted = passes.long().cumprod(-1).bool()
    count = accepted.sum(-1)
    p = target[rows, count].to(kind).softmax(-1)
    if steps > 0:
        q = draft[rows, count.clamp_max(steps - 1)].to(kind).softmax(-1).nan_to_num_(0)
        rejected = (count < steps).to(kind)[:, None]
        p = (p - rejected * q).clamp_min_(0).add_(p, alpha=RESIDUAL_FLOOR)
    return ChainVerdict(accepted, count, (p.log_() + noise).argmax(-1))


def _check_shapes(tokens: Tensor, **logits: tuple[Tensor, int]) -> None:
    """`logits`: by name, and how many rows they have beyond the K of `tokens` [B, K]."""
    if tokens.dim() != 2:
        raise ValueError(f"tokens must be [requests, draft tokens], not {list(tokens.shape)}")
    batch, steps = tokens.shape
    vocab = next(iter(logits.values()))[0].shape[-1:]
    for name, (rows, extra) in logits.items():
        want = (batch, steps + extra, *vocab)
        if rows.shape != want:
            raise ValueError(f"{name} must be {list(want)} for tokens {list(tokens.shape)}, not {list(rows.shape)}")


def accept_matching_prefix(best: Tensor, tokens: Tensor) -> ChainVerdict:
    """Keeps draft tokens [B, K] as long as each is the target's own `best` [B, K + 1] there."""
    accepted = (best[:, :-1] == tokens).long().cumprod(-1).bool()
    count = accepted.sum(-1)
    return ChainVerdict(accepted, count, best.gather(1, count[:, None]).squeeze(1))


def _log_probs(logits: Tensor, tokens: Tensor, kind: torch.dtype) -> Tensor:
    """log softmax(logits [B, >= K, V]) of tokens [B, K]: [B, K], a position at a time."""
    out = torch.empty(tokens.shape, dtype=kind, device=logits.device)
    for k in range(tokens.shape[1]):
        here = logits[:, k].to(kind)
        out[:, k] = here.gather(1, tokens[:, k, None]).squeeze(1) - here.logsumexp(-1)
    return out
