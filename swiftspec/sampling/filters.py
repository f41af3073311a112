"""min_p, top_k and top_p filters on whole rows of logits [n, V]. Each sets the logits below a threshold to -inf."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from swiftspec.params import SamplingParams

NEG_INF = float("-inf")
TOP_CANDIDATES = 256  # tokens; enough for top_p in nearly all rows, and ten times faster than a sort of all tokens
FastPathCheck = Callable[[Tensor], bool]  # whether all bools [n] or [n, 1] are True: the fast path is valid


def all_on_host(holds: Tensor) -> bool:
    """Returns whether all entries are True; the default `FastPathCheck`. Synchronises with the device."""
    return bool(holds.all())


def apply_filters(logits: Tensor, params: SamplingParams, check_all: FastPathCheck = all_on_host) -> Tensor:
    """Applies min_p, top_k and top_p in this order; filtered logits become -inf."""
    logits = apply_min_p_top_k(logits, params)
    return apply_top_p(logits, params.top_p, check_all=check_all) if params.top_p < 1 else logits


def apply_min_p_top_k(logits: Tensor, params: SamplingParams) -> Tensor:
    """Applies min_p and top_k, for which the most likely tokens of a row suffice."""
    if params.min_p > 0:
        limit = logits.amax(-1, keepdim=True) + torch.log(torch.tensor(params.min_p))
        logits = logits.masked_fill(logits < limit, NEG_INF)
    if 0 < params.top_k < logits.shape[-1]:
        limit = logits.topk(params.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < limit, NEG_INF)
    return logits


def apply_top_p(
    logits: Tensor,
    p: float,
    total: Tensor | None = None,
    num_candidates: int = TOP_CANDIDATES,
    check_all: FastPathCheck = all_on_host,
) -> Tensor:
    """Keeps the smallest set of most likely tokens whose probabilities sum to at least `p`, and all tokens tied with
    the last one.

    `total` [n, 1]: logsumexp of the complete row, if `logits` contain only its most likely tokens. `num_candidates`:
    number of most likely tokens that are ranked; unless `check_all` confirms that they suffice, all tokens are sorted.
    """
    num_candidates = min(num_candidates, logits.shape[-1])
    total = logits.logsumexp(-1, keepdim=True) if total is None else total
    ranked = logits.topk(num_candidates).values
    if num_candidates < logits.shape[-1] and not check_all(~((ranked - total).exp().sum(-1) < p)):
        ranked = logits.sort(-1, descending=True).values
    mass = (ranked - total).exp()
    before = mass.cumsum(-1) - mass
    last = ((before < p).sum(-1, keepdim=True) - 1).clamp_min_(0)  # clamped because comparisons with NaN are false
    return logits.masked_fill(logits < ranked.gather(-1, last), NEG_INF)
