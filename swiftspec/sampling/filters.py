"""min_p, top_k and top_p on whole rows of logits [n, V]. Each of them keeps the tokens from some logit upwards."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from swiftspec.params import SamplingParams

NEG_INF = float("-inf")
TOP_CANDIDATES = 256  # tokens that nearly always reach p; to sort the whole vocabulary costs ten times more
CheckAll = Callable[[Tensor], bool]  # whether all of [n] or [n, 1] bools hold, so that a short way may be gone


def all_on_host(holds: Tensor) -> bool:
    """By a look at the device."""
    return bool(holds.all())


def apply_filters(logits: Tensor, params: SamplingParams, check_all: CheckAll = all_on_host) -> Tensor:
    """All filters of a request, in their order; what they forbid is -inf."""
    logits = apply_min_p_top_k(logits, params)
    return apply_top_p(logits, params.top_p, check_all=check_all) if params.top_p < 1 else logits


def apply_min_p_top_k(logits: Tensor, params: SamplingParams) -> Tensor:
    """min_p and top_k, which look at the likeliest tokens only."""
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
    check_all: CheckAll = all_on_host,
) -> Tensor:
    """Keeps the fewest likeliest tokens whose probabilities reach p; tokens tied with the last kept one stay.

    `total` [n, 1]: the logsumexp of the row, where `logits` are only the likeliest of it. `head`: how many are ranked
    first, and whether that is enough must be `sure`; with all of them it is.
    """
    num_candidates = min(num_candidates, logits.shape[-1])
    total = logits.logsumexp(-1, keepdim=True) if total is None else total
    ranked = logits.topk(num_candidates).values
    if num_candidates < logits.shape[-1] and not check_all(~((ranked - total).exp().sum(-1) < p)):
        ranked = logits.sort(-1, descending=True).values
    mass = (ranked - total).exp()
    before = mass.cumsum(-1) - mass
    last = ((before < p).sum(-1, keepdim=True) - 1).clamp_min_(0)  # NaN is below nothing
    return logits.masked_fill(logits < ranked.gather(-1, last), NEG_INF)
