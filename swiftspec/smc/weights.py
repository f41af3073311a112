"""The distribution that a population of particles follows, and the weights that achieve it.

Let p(x | prefix) be the target after temperature and filters, q the draft after temperature, and alpha the power. The
population follows the **global power target**: over whole texts x_1 .. x_n that end at a stop token or at the limit,

    pi(x) = p(x_1)^alpha p(x_2 | x_1)^alpha ... / Z,        Z = sum of the numerator over all texts,

and not the product of locally normalised steps b(x | prefix) = p(x | prefix)^alpha / Z(prefix), where
Z(prefix) = sum over tokens v of p(v | prefix)^alpha. The two agree for alpha = 1, where every Z(prefix) and Z is 1;
for alpha = 2 they do not: local steps cannot see that a likely token leads to a context where all tokens are unlikely;
the global power does. So each token multiplies its particle's weight by p^alpha / (the distribution it was drawn from):

- a draft token x ~ q:             alpha log p(x) - log q(x)
- the bonus token x ~ b:           alpha log p(x) - log b(x) = log Z(prefix), whichever token it is
- an exactly verified token (accepted, or drawn from the residual, hence x ~ b): log Z(prefix) too

With the first term alone, without the bonus token's log Z(prefix), the population follows neither distribution. Tokens
after a particle's last one add nothing. A particle's weight is then an unbiased estimate of its share of Z. Resampling
(systematic, weights reset to their mean) preserves that, and log Z is the sum of the logarithms of those means.
Expectations over the weighted population are off by O(1 / N). tests/smc/test_smc_distribution.py verifies the
distribution.

For Z and pi to be right, q must reach whatever p reaches, so the filters (top-k, top-p, min-p) shape p alone. Let A be
the set of tokens that the filters keep, and q(A) the draft's probability of that set:

- a draft token x in A:            alpha log p(x) - log q(x) + log q(A)
- a draft token outside A ends the particle's round, and a token y ~ b replaces it: log Z(prefix)

Both cases together give every token v of A the expected weight q(A) p(v)^alpha + (1 - q(A)) b(v) Z(prefix), which
equals p(v)^alpha, and no particle's weight is ever zero.

Exact verification of the first tokens of a round (`smc_exact`) works in the same way, with the acceptance rule of
rejection sampling instead of the membership in A. The particles then differ in length, which is allowed: each weight is
correct for its own text. With all K tokens verified and alpha = 1 nothing is approximate, for any N.

A few of the N texts can represent all (`thin_weights`): the heavy ones are kept, others are drawn, each with a new
weight whose expectation is its weight in the population. Estimates that are unbiased for the whole population are then
unbiased for the few.

All this only requires p to be a distribution over tokens for each prefix. Penalties, which depend on a particle's own
text, preserve that; they apply to p and q.

Symbols: N particles, K draft tokens per round, V tokens. Logits are processed (temperature, filters, bias, penalties)
and not normalised.
Source: SMC-SD engine v0.1 section 1, v0.2 section 5; Del Moral, Doucet, Jasra 2006 for the distribution.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from swiftspec.sampling.filters import NEG_INF

RESIDUAL_FLOOR = 1e-30  # weight of b that is added to a residual, which is zero where b = q


def log_prob(logits: Tensor, whole: Tensor, tokens: Tensor) -> Tensor:
    """Returns the log-probabilities [...] of `tokens` [...] under softmax(logits [..., V]), in float64. `whole`: [...],
    logsumexp of the logits."""
    return (logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - whole).to(torch.float64)


def log_normaliser(logits: Tensor, whole: Tensor, power: float) -> Tensor:
    """Returns log Z(prefix) [...] in float64, where Z(prefix) is the sum of p^`power` over the vocabulary; 0 if `power`
    is 1. `logits`: [..., V] of p. `whole`: [...], logsumexp of the logits."""
    if power == 1:
        return torch.zeros_like(whole, dtype=torch.float64)
    return ((power * logits).logsumexp(-1) - power * whole).to(torch.float64)


def log_mass_inside(target: Tensor, draft: Tensor) -> Tensor:
    """Returns the logarithm [...] of the draft's probability that a token passes the target's filters, in float64.
    `target`, `draft`: logits [..., V]; filtered tokens are -inf in `target`."""
    left = draft.masked_fill(target == NEG_INF, NEG_INF)
    return (left.logsumexp(-1) - draft.logsumexp(-1)).to(torch.float64)


def accept_drafts(target: Tensor, draft: Tensor, tokens: Tensor, uniforms: Tensor, power: float) -> Tensor:
    """Returns which draft tokens pass the acceptance test of rejection sampling against b, the normalised p^`power`:
    [rows, steps] bool. Each token is tested on its own, whether or not those before it pass.

    `target`, `draft`: logits [rows, steps, V] of p and q before each token.
    `tokens`: [rows, steps].
    `uniforms`: [rows, steps], uniform in (0, 1).

    Source: Leviathan et al. 2023, algorithm 1, with b for p.
    """
    ratio = (power * target).log_softmax(-1) - draft.log_softmax(-1)
    return uniforms.log() < ratio.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def log_residual(target: Tensor, draft: Tensor, power: float) -> Tensor:
    """Returns log max(b - q, 0) [rows, V], not normalised, where b is the normalised p^`power`: the distribution of the
    token that replaces a rejected one. `target`, `draft`: logits [rows, V] of p and q."""
    b, q = (power * target).softmax(-1), draft.softmax(-1)
    return ((b - q).clamp_min(0) + RESIDUAL_FLOOR * b).log()


def pick_particle(log_weights: Sequence[float], uniform: float) -> tuple[int, list[float]]:
    """Picks a particle of a group with probability proportional to its weight, by one number `uniform` in (0, 1).
    Returns its index and the normalised weights [N]. Runs on the host, since it is called once per request. Source:
    SMC-SD engine v0.1 section 3.5."""
    top = max(log_weights)
    raised = [math.exp(weight - top) for weight in log_weights]
    whole = math.fsum(raised)
    shares = [weight / whole for weight in raised]
    return min(bisect_right([*accumulate(shares)], uniform), len(shares) - 1), shares


def thin_weights(shares: Tensor, count: int, uniform: float) -> Tensor:
    """Returns new weights [texts], at most `count` of them above 0, whose expectations are the weights `shares`
    [texts].

    `shares`: normalised weights, all above 0. `uniform`: uniform number in (0, 1).

    The k heaviest texts keep their weight. Each of the others stays with a probability proportional to its weight, and
    then has the weight c, the same for all: c = (sum of the weights of the others) / (count - k), with the smallest k
    for which none of the others' weights exceeds c. If there are at most `count` texts, all keep their weights; with
    count = 1 one is drawn by its weight. No other unbiased choice is closer to `shares` in mean square. Source:
    Fearnhead, Clifford 2003, section 3; the draw is systematic.
    """
    if count >= len(shares):
        return shares
    ranked = shares.sort(descending=True).values
    left = ranked.flip(0).cumsum(0).flip(0)[:count]  # remaining weight from each rank on
    each = left / torch.arange(count, 0, -1, device=shares.device)
    heavy = int((ranked[:count] <= each).to(torch.int64).argmax())  # k; the condition always holds for the last rank
    c = float(each[heavy])
    own = shares > c
    edges = torch.where(own, 0, shares / c).cumsum(0)
    points = torch.arange(count - heavy, device=shares.device) + uniform
    drawn = torch.searchsorted(edges, points.to(edges.dtype), right=True)
    return torch.where(own, shares, 0).index_fill(0, drawn, c)
