"""Chains for the verification on a device, and what backends/reference/chains.py makes of them; for tests with and
without a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from swiftspec.backends.reference import chains as verify
from swiftspec.backends.reference import noise
from swiftspec.backends.reference.chains import ChainVerdict

MARGIN = 2e-4  # of a logarithm: decisions that float32 may take differently are left out


@dataclass(frozen=True)
class Chains:
    """Chains of K drawn tokens of several requests over V tokens, on the CPU."""

    target: Tensor  # [requests, K + 1, V]
    draft: Tensor  # [requests, K, V]
    tokens: Tensor  # [requests, K]
    uniforms: Tensor  # [requests, K] float32
    keys: Tensor  # [requests, K + 1] int32

    @property
    def noise(self) -> Tensor:
        """Gumbel noise of the keys, [requests, K + 1, V] float64."""
        return noise.gumbel(noise.row_bits(self.keys, noise.counters(range(self.target.shape[-1]))), torch.float64)


def make_chains(seed: int, batch: int, steps: int, vocab: int, dtype: torch.dtype, apart: float = 1.0) -> Chains:
    """`apart`: how far the draft is from the target. Some tokens are forbidden, likely, or equal."""
    dice = torch.Generator().manual_seed(seed)
    target = 2 * torch.randn(batch, steps + 1, vocab, generator=dice)
    draft = target[:, :steps] + apart * torch.randn(batch, steps, vocab, generator=dice)
    for logits in (target, draft):
        logits[torch.rand(logits.shape, generator=dice) < 0.3] = -math.inf
        logits[..., seed % vocab] = 3
    target, draft = target.to(dtype), draft.to(dtype)
    flat = draft.float().softmax(-1).view(-1, vocab)
    drawn = torch.multinomial(flat, 1, generator=dice) if steps else torch.zeros(0, dtype=torch.int64)
    uniforms = torch.rand(batch, steps, generator=dice).clamp_min(1e-7)
    keys = torch.randint(-(2**31), 2**31, (batch, steps + 1), generator=dice).to(torch.int32)
    return Chains(target, draft, drawn.view(batch, steps), uniforms, keys)


def matched(
    c: Chains, *, noisy: bool, temperature: float = 1.0, bias: Tensor | None = None
) -> tuple[ChainVerdict, Tensor]:
    """The verdict by matching in float64, and [requests] bool: whether rounding decides none of it."""
    scores = (c.target.double() + (0 if bias is None else bias.double())) / temperature
    scores = scores + c.noise if noisy else scores
    sure = _ahead(scores).all(-1) if noisy or temperature != 1 else torch.ones(len(scores), dtype=torch.bool)
    return verify.accept_matching_prefix(scores.argmax(-1), c.tokens), sure


def rejected(c: Chains) -> tuple[ChainVerdict, Tensor]:
    """The same by rejection sampling. The noise is that of the position of the next token."""
    target, draft, steps = c.target.double(), c.draft.double(), c.tokens.shape[1]
    zero = torch.zeros(1, 1, dtype=torch.float64)
    rows = torch.arange(len(target))
    count = verify.verify_by_rejection(target, draft, c.tokens, c.uniforms, zero).count
    drawn = c.noise[rows, count]
    log_p = target.log_softmax(-1)
    if steps == 0:
        return verify.verify_by_rejection(target, draft, c.tokens, c.uniforms, drawn), _ahead(log_p[:, 0] + drawn)
    index, log_q = c.tokens[..., None], draft.log_softmax(-1)
    edge = log_p[:, :steps].gather(-1, index) - log_q.gather(-1, index) - c.uniforms.double().log()[..., None]
    q = log_q[rows, count.clamp_max(steps - 1)].exp() * (count < steps)[:, None]
    p = log_p[rows, count].exp()
    left = ((p - q).clamp_min(0) + verify.RESIDUAL_FLOOR * p).log() + drawn
    sure = (edge.abs() > MARGIN).all(1).squeeze(-1) & _ahead(left)
    return verify.verify_by_rejection(target, draft, c.tokens, c.uniforms, drawn), sure


def _ahead(scores: Tensor) -> Tensor:
    """Whether the largest of [..., V] leads by the margin."""
    if scores.shape[-1] == 1:
        return torch.ones(scores.shape[:-1], dtype=torch.bool)
    first, second = scores.topk(2).values.unbind(-1)
    return first - second > MARGIN


def check_equal(found: ChainVerdict, want: ChainVerdict, sure: Tensor) -> None:
    """Compares the verdicts of the requests that are sure."""
    for name in ("accepted", "count", "bonus"):
        assert torch.equal(getattr(found, name).cpu()[sure], getattr(want, name)[sure]), name
