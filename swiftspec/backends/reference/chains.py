"""Batched verification of draft chains: the number of draft tokens that the target accepts, and its bonus token.

The functions run on the device, without branches and without loops over requests. They are exact for any sampling
parameters: the caller applies filters and penalties to the logits, and forbidden tokens are -inf. Not part of the
operator protocol of the backends, since only batches need them. Trees are verified on the host, one at a time
(tree/acceptance.py, tree/rejection.py).

Shapes: one chain of K draft tokens per request, V tokens in the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RESIDUAL_FLOOR = 1e-30  # weight of p that is added to a residual, which rounding could make zero


@dataclass(frozen=True, slots=True)
class ChainVerdict:
    """Result of the verification of a batch of chains."""

    accepted: Tensor  # [requests, K] bool; True for the leading tokens that are accepted
    count: Tensor  # [requests] int64, number of accepted tokens
    bonus: Tensor  # [requests] int64, the token after the accepted ones


def verify_by_rejection(target: Tensor, draft: Tensor, tokens: Tensor, uniforms: Tensor, noise: Tensor) -> ChainVerdict:
    """Verifies draft tokens by rejection sampling: the output follows p, whatever q is.

    `target`: processed logits of p, [requests, K + 1, V].
    `draft`: processed logits of q, [requests, K, V]; a row without a finite logit counts as q = 0 for every token.
    `tokens`: [requests, K], sampled from q.
    `uniforms`: [requests, K], uniform in (0, 1), one per acceptance test.
    `noise`: [requests, V], standard Gumbel noise for the token after the accepted ones.

    A token is accepted with probability min(1, p / q). The first rejected token is replaced by a sample of the residual
    distribution norm(max(0, p - q)); if all K tokens are accepted, the next token is sampled from p. Raises ValueError
    on wrong shapes. Arithmetic is float32, or float64 for float64 logits. The softmax is computed for one position at a
    time, so probabilities [requests, K, V] are never materialised. Source: Leviathan et al. 2023, algorithm 1.
    """
    _check_shapes(tokens, target=(target, 1), draft=(draft, 0))
    if uniforms.shape != tokens.shape:
        raise ValueError(f"uniforms must have the shape of tokens, {list(tokens.shape)}, not {list(uniforms.shape)}")
    steps, rows = tokens.shape[1], torch.arange(tokens.shape[0], device=tokens.device)
    kind = torch.float64 if target.dtype == torch.float64 else torch.float32
    log_p, log_q = (_log_probs(logits, tokens, kind) for logits in (target, draft))
    # q > 0, since the tokens were sampled from q; a token with p = 0 is always rejected
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
    """Raises ValueError unless `tokens` is [requests, K] and the logits have matching shapes. `logits`: by name, a
    tensor [requests, K + extra, V] and `extra`."""
    if tokens.dim() != 2:
        raise ValueError(f"tokens must have shape [requests, draft tokens], not {list(tokens.shape)}")
    batch, steps = tokens.shape
    vocab = next(iter(logits.values()))[0].shape[-1:]
    for name, (rows, extra) in logits.items():
        want = (batch, steps + extra, *vocab)
        if rows.shape != want:
            raise ValueError(
                f"{name} must have shape {list(want)} for tokens {list(tokens.shape)}, not {list(rows.shape)}"
            )


def accept_matching_prefix(best: Tensor, tokens: Tensor) -> ChainVerdict:
    """Accepts the draft tokens before the first one that differs from the target's token.

    `best`: [requests, K + 1], the target's token at each position, the bonus token included.
    `tokens`: [requests, K] draft tokens.
    """
    accepted = (best[:, :-1] == tokens).long().cumprod(-1).bool()
    count = accepted.sum(-1)
    return ChainVerdict(accepted, count, best.gather(1, count[:, None]).squeeze(1))


def _log_probs(logits: Tensor, tokens: Tensor, kind: torch.dtype) -> Tensor:
    """Returns the log-probabilities [requests, K] of `tokens` [requests, K] under softmax(`logits`), in dtype `kind`.
    `logits`: [requests, at least K, V]. Processes one position at a time."""
    out = torch.empty(tokens.shape, dtype=kind, device=logits.device)
    for k in range(tokens.shape[1]):
        row = logits[:, k].to(kind)
        out[:, k] = row.gather(1, tokens[:, k, None]).squeeze(1) - row.logsumexp(-1)
    return out
