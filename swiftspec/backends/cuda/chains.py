"""Verification of chains on a GPU, one launch for all requests (csrc/cuda/chains/verify.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cuda.torch_interop import current_stream
from swiftspec.backends.reference.chains import ChainVerdict
from swiftspec.backends.reference.sampling import Scores

MARK_WORDS = 4  # int32 words of a PositionMark


def match_chains(logits: Tensor, vocab: int, tokens: Tensor, keys: Tensor | None, scores: Scores) -> ChainVerdict:
    """Accepts the draft tokens before the first one that differs from the target's token, as `draw_keyed` draws it.

    `logits`: raw logits of the target, [requests, K + 1, at least `vocab`] float32 or bfloat16.
    `tokens`: [requests, K] int64.
    `keys`: [requests, K + 1] int32, noise key of each position; None: the most likely token, as `draw`.
    `scores`: bias and temperature.

    The bonus token is -1 if logits are not finite.
    """
    return _verify(
        target=logits[..., :vocab],
        tokens=tokens,
        keys=keys,
        bias=scores.bias,
        temperature=scores.temperature,
        draft=None,
        uniforms=None,
    )


def reject_chains(target: Tensor, draft: Tensor, tokens: Tensor, uniforms: Tensor, keys: Tensor) -> ChainVerdict:
    """`reference.chains.verify_by_rejection` with noise keys instead of noise: the noise is not written to memory.

    `target`, `draft`: processed logits, [requests, K + 1, V] and [requests, K, V], both float32 or both bfloat16.
    `uniforms`: [requests, K].
    `keys`: [requests] int32, noise key of the token after the accepted ones.

    Arithmetic is float32. The bonus token is -1 if logits are not finite.
    """
    each = keys[:, None].expand(-1, target.shape[1]).contiguous()
    return _verify(
        target=target,
        tokens=tokens,
        keys=each,
        bias=None,
        temperature=1.0,
        draft=draft,
        uniforms=uniforms.to(torch.float32),
    )


def _verify(
    target: Tensor,
    tokens: Tensor,
    keys: Tensor | None,
    bias: Tensor | None,
    temperature: float,
    draft: Tensor | None,
    uniforms: Tensor | None,
) -> ChainVerdict:
    (batch, steps), device = tokens.shape, tokens.device
    accepted = torch.empty(batch, steps, dtype=torch.bool, device=device)
    count, bonus = (torch.empty(batch, dtype=torch.int64, device=device) for _ in range(2))
    if batch > 0:
        _C.verify_chains_cuda(
            target=target,
            draft=draft,
            bias=bias,
            temperature=temperature,
            tokens=tokens.contiguous(),
            uniforms=uniforms,
            keys=keys,
            marks=torch.empty(batch * (steps + 1) * MARK_WORDS, dtype=torch.int32, device=device),
            arrived=torch.zeros(batch, dtype=torch.int32, device=device),
            accepted=accepted,
            count=count,
            bonus=bonus,
            stream=current_stream(),
        )
    return ChainVerdict(accepted, count, bonus)
