"""Chains for the device's verification, and what smc/chain_verification.py says of them; for tests with and without
a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from swiftspec.backends.reference import noise
from swiftspec.smc import chain_verification as verify
from swiftspec.smc.chain_verification import Verified

MARGIN = 2e-4  # of a logarithm: decisions that float32 may take differently are left out


@dataclass(frozen=True)
class Chains:
    """B requests of K drawn tokens over V, on the CPU."""

    target: Tensor  # [B, K + 1, V]
    draft: Tensor  # [B, K, V]
    tokens: Tensor  # [B, K]
    coins: Tensor  # [B, K] float32
    keys: Tensor  # [B, K + 1] int32

    @property
    def noise(self) -> Tensor:
        """[B, K + 1, V] float64, made of the keys."""
        return noise.gumbel(noise.row_bits(self.keys, noise.counters(range(self.target.shape[-1]))), torch.float64)


def chains(seed: int, batch: int, steps: int, vocab: int, dtype: torch.dtype, apart: float = 1.0) -> Chains:
    """`apart`: how far the draft is from the target. Tokens are forbidden, likely and equal here and there."""
    dice = torch.Generator().manual_seed(seed)
    target = 2 * torch.randn(batch, steps + 1, vocab, generator=dice)
    draft = target[:, :steps] + apart * torch.randn(batch, steps, vocab, generator=dice)
    for logits in (target, draft):
        logits[torch.rand(logits.shape, generator=dice) < 0.3] = -math.inf
        logits[..., seed % vocab] = 3
    target, draft = target.to(dtype), draft.to(dtype)
    flat = draft.float().softmax(-1).view(-1, vocab)
    drawn = torch.multinomial(flat, 1, generator=dice) if steps else torch.zeros(0, dtype=torch.int64)
    coins = torch.rand(batch, steps, generator=dice).clamp_min(1e-7)
    keys = torch.randint(-(2**31), 2**31, (batch, steps + 1), generator=dice).to(torch.int32)
    return Chains(target, draft, drawn.view(batch, steps), coins, keys)


def matched(c: Chains, *, noisy: bool) -> tuple[Verified, Tensor]:
    """What `greedy`, or with noise `match`, makes of them in float64; and [B] bool: rounding decides none of it."""
    if not noisy:
        return verify.greedy(c.target, c.tokens), torch.ones(len(c.target), dtype=torch.bool)
    scores = c.target.double() + c.noise
    return verify.match(c.target.double(), c.tokens, c.noise), _ahead(scores).all(-1)


def rejected(c: Chains) -> tuple[Verified, Tensor]:
    """The same for `reject`, whose noise is that of the position where the next token stands."""
    target, draft, steps = c.target.double(), c.draft.double(), c.tokens.shape[1]
    zero = torch.zeros(1, 1, dtype=torch.float64)
    rows, count = torch.arange(len(target)), verify.reject(target, draft, c.tokens, c.coins, zero).count
    drawn = c.noise[rows, count]
    log_p = target.log_softmax(-1)
    if steps == 0:
        return verify.reject(target, draft, c.tokens, c.coins, drawn), _ahead(log_p[:, 0] + drawn)
    index, log_q = c.tokens[..., None], draft.log_softmax(-1)
    edge = log_p[:, :steps].gather(-1, index) - log_q.gather(-1, index) - c.coins.double().log()[..., None]
    q = log_q[rows, count.clamp_max(steps - 1)].exp() * (count < steps)[:, None]
    p = log_p[rows, count].exp()
    left = ((p - q).clamp_min(0) + verify.TINY * p).log() + drawn
    sure = (edge.abs() > MARGIN).all(1).squeeze(-1) & _ahead(left)
    return verify.reject(target, draft, c.tokens, c.coins, drawn), sure


def _ahead(scores: Tensor) -> Tensor:
    """Whether the best of [..., V] leads by the margin."""
    if scores.shape[-1] == 1:
        return torch.ones(scores.shape[:-1], dtype=torch.bool)
    first, second = scores.topk(2).values.unbind(-1)
    return first - second > MARGIN


def agree(found: tuple[Tensor, Tensor, Tensor], want: Verified, sure: Tensor) -> None:
    """Accepted, count and bonus of the requests that are sure."""
    for ours, theirs in zip(found, (want.accepted, want.count, want.bonus), strict=True):
        assert torch.equal(ours.cpu()[sure], theirs[sure])
