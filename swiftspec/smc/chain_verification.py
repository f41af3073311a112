"""Verification of chains: which draft tokens the target accepts, and the token that it adds.

Batched, for a device, without branches and without loops over rows: `accept_matching_prefix` and
`verify_by_rejection`. Trees are verified on the host, one at a time (tree/acceptance.py, tree/rejection.py). All
methods are exact for any sampling parameters: logits are processed (temperature, filters, penalties, bias) before they
are passed in, and forbidden tokens are -inf.

Symbols: B requests, K draft tokens per request, V tokens. Wrong shapes raise ValueError.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RESIDUAL_FLOOR = 1e-30  # weight of p in a residual; matters only where rounding leaves a residual of zero


@dataclass(frozen=True, slots=True)
class ChainVerdict:
    """The outcome for B chains."""

    accepted: Tensor  # [B, K] bool, a prefix of each row
    count: Tensor  # [B] int64, number of accepted tokens
    bonus: Tensor  # [B] int64, the target's token after the accepted ones


def verify_by_rejection(target: Tensor, draft: Tensor, tokens: Tensor, uniforms: Tensor, noise: Tensor) -> ChainVerdict:
    """Rejection sampling of tokens that were sampled from the draft: the output follows p, whatever q is.

    `target`, `draft`: [B, K + 1, V] and [B, K, V] processed logits of p and q. A draft row without a finite logit is a
    q of zeros.
    `tokens`: [B, K] sampled from q.
    `uniforms`: [B, K] uniform in (0, 1).
    `noise`: [B, V] standard Gumbel.

    A token is accepted with probability min(1, p / q). The first rejected one is replaced by a sample of the residual
    distribution norm(max(0, p - q)); after K accepted tokens one is sampled from p. Arithmetic is float32, or float64
    for float64 logits. Probabilities of a whole [B, K, V] are never materialised. Source: Leviathan et al. 2023,
    algorithm 1.
    """
    _check_shapes(tokens, target=(target, 1), draft=(draft, 0))
    if uniforms.shape != tokens.shape:
        raise ValueError(f"uniforms must be {list(tokens.shape)}, as the tokens are, not {list(uniforms.shape)}")
    steps, rows = tokens.shape[1], torch.arange(tokens.shape[0], device=tokens.device)
    kind = torch.float64 if target.dtype == torch.float64 else torch.float32
    log_p, log_q = (_log_probs(logits, tokens, kind) for logits in (target, draft))
    # a token with q = 0 was not sampled; p = 0 would make the difference NaN
    passes = (uniforms.to(kind).log() < log_p - log_q) & (log_p > -torch.inf)
    accepted = passes.long().cumprod(-1).bool()
    count = accepted.sum(-1)
    p = target[rows, count].to(kind).softmax(-1)
    if steps > 0:
        q = draft[rows, count.clamp_max(steps - 1)].to(kind).softmax(-1).nan_to_num_(0)
        rejected = (count < steps).to(kind)[:, None]
        p = (p - rejected * q).clamp_min_(0).add_(p, alpha=RESIDUAL_FLOOR)
    return ChainVerdict(accepted, count, (p.log_() + noise).argmax(-1))


def _check_shapes(tokens: Tensor, **logits: tuple[Tensor, int]) -> None:
    """`logits`: by name, the tensor and its number of rows beyond the K of `tokens` [B, K]."""
    if tokens.dim() != 2:
        raise ValueError(f"tokens must be [requests, draft tokens], not {list(tokens.shape)}")
    batch, steps = tokens.shape
    vocab = next(iter(logits.values()))[0].shape[-1:]
    for name, (rows, extra) in logits.items():
        want = (batch, steps + extra, *vocab)
        if rows.shape != want:
            raise ValueError(f"{name} must be {list(want)} for tokens {list(tokens.shape)}, not {list(rows.shape)}")


def accept_matching_prefix(best: Tensor, tokens: Tensor) -> ChainVerdict:
    """Accepts draft tokens [B, K] as long as each equals the target's own token, `best` [B, K + 1]."""
    accepted = (best[:, :-1] == tokens).long().cumprod(-1).bool()
    count = accepted.sum(-1)
    return ChainVerdict(accepted, count, best.gather(1, count[:, None]).squeeze(1))


def _log_probs(logits: Tensor, tokens: Tensor, kind: torch.dtype) -> Tensor:
    """log softmax(logits [B, >= K, V]) of tokens [B, K]: [B, K], one position at a time."""
    out = torch.empty(tokens.shape, dtype=kind, device=logits.device)
    for k in range(tokens.shape[1]):
        row = logits[:, k].to(kind)
        out[:, k] = row.gather(1, tokens[:, k, None]).squeeze(1) - row.logsumexp(-1)
    return out
