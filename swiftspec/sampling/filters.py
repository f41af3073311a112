"""min_p, top_k and top_p filters on whole rows of logits [..., n, V]. They keep the logits from a threshold on and set
the others to -inf."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from swiftspec.sampling.logits_params import ParameterTensors

NEG_INF = float("-inf")
TOP_CANDIDATES = 256  # tokens; enough for top_p in nearly all rows, and ten times faster than a sort of all tokens
FastPathCheck = Callable[[Tensor], bool]  # whether all bools [n, 1] are True: the fast path is valid


def all_on_host(holds: Tensor) -> bool:
    """Returns whether all entries are True; the default `FastPathCheck`. Synchronises with the device."""
    return bool(holds.all())


def apply_filters(
    logits: Tensor,
    params: ParameterTensors,
    check_all: FastPathCheck = all_on_host,
    num_candidates: int = TOP_CANDIDATES,
) -> Tensor:
    """Applies min_p, top_k and top_p in this order; filtered logits become -inf. Tokens tied with the last one that is
    kept are kept too.

    `num_candidates`: number of most likely tokens that are ranked; unless `check_all` confirms that they suffice, all
    tokens are ranked.
    """
    limit, certain = _threshold(logits, params, num_candidates)
    if num_candidates < logits.shape[-1] and not check_all(certain):
        limit, _ = _threshold(logits, params, logits.shape[-1])
    return logits.masked_fill(logits < limit, NEG_INF)


def _threshold(logits: Tensor, params: ParameterTensors, num_candidates: int) -> tuple[Tensor, Tensor]:
    """Returns the smallest logit [n, 1] that the filters keep, and whether the candidates suffice to find it, bool
    [n, 1]."""
    vocab = logits.shape[-1]
    ranked = logits.topk(min(num_candidates, vocab)).values
    limit, certain = head_threshold(ranked, params, vocab)
    total = logits.masked_fill(logits < limit, NEG_INF).logsumexp(-1, keepdim=True)
    last, reached = top_p_threshold(ranked.masked_fill(ranked < limit, NEG_INF), total, params)
    return torch.maximum(limit, last), certain & reached


def head_threshold(ranked: Tensor, params: ParameterTensors, vocab: int) -> tuple[Tensor, Tensor]:
    """Returns the smallest logit [n, 1] that min_p and top_k keep, and whether the candidates suffice to find it, a
    bool []. `ranked` [n, c]: the logits of each row's most likely tokens in descending order."""
    limit = ranked[..., :1] + params["min_p"].float().log()
    limited, enough = limits_top_k(params, vocab), params["top_k"] <= ranked.shape[-1]
    kth = (params["top_k"].clamp(1, ranked.shape[-1]).long() - 1).expand(*ranked.shape[:-1], 1)
    smallest = ranked.masked_fill(ranked < limit, NEG_INF).gather(-1, kth)
    return torch.maximum(limit, smallest.masked_fill(~limited, NEG_INF)), ~limited | enough


def limits_head(params: ParameterTensors, vocab: int) -> Tensor:
    """Returns whether min_p or top_k, which precede top_p, may exclude a token, a bool []."""
    return (params["min_p"] > 0) | limits_top_k(params, vocab)


def limits_top_k(params: ParameterTensors, vocab: int) -> Tensor:
    """Returns whether top_k excludes a token, a bool []."""
    return (params["top_k"] > 0) & (params["top_k"] < vocab)


def top_p_threshold(ranked: Tensor, total: Tensor, params: ParameterTensors) -> tuple[Tensor, Tensor]:
    """Returns the smallest logit [n, 1] of the smallest set of most likely tokens whose probabilities sum to at least
    top_p, and whether the candidates reach that sum, bool [n, 1].

    `ranked` [n, c]: the logits of each row's most likely tokens in descending order. `total` [n, 1]: logsumexp of the
    complete row.
    """
    mass = (ranked - total).exp()
    before = mass.cumsum(-1) - mass
    # clamped because comparisons with NaN are false
    last = ((before < params["top_p"]).sum(-1, keepdim=True) - 1).clamp_min_(0)
    unlimited = params["top_p"] >= 1
    reached = unlimited | ~(mass.sum(-1, keepdim=True) < params["top_p"])
    return ranked.gather(-1, last).masked_fill(unlimited, NEG_INF), reached
