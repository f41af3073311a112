"""Sharded vocabulary: the collectives by which all ranks of a tensor-parallel group select the same tokens.

Messages are gathered in rank order and every rank computes the same result from them, so results are identical by
construction. Letters: n rows of scores or logits, V tokens of the base vocabulary, m of them on this rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec.sampling import filters
from swiftspec.sampling.filters import NEG_INF, FastPathCheck, all_on_host
from swiftspec.sampling.logits_params import LogitsParams

TOP_CANDIDATES = 64  # most likely tokens that each rank sends for a filter; enough for nearly every filter


class VocabGroup(Protocol):
    """The tensor-parallel group whose ranks share a vocabulary."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_gather(self, x: Tensor, /) -> Tensor:
        """Returns `x` of all ranks in rank order: [size, *x.shape]."""
        ...


@dataclass(frozen=True, slots=True)
class VocabShard:
    """One rank's part of the vocabulary: `width` consecutive tokens, fewer or none at its end."""

    group: VocabGroup
    width: int
    vocab: int  # V

    @property
    def tokens(self) -> range:
        """Token ids of this rank, m of them."""
        first = self.group.rank * self.width
        return range(min(first, self.vocab), min(first + self.width, self.vocab))

    @property
    def num_exchanged(self) -> int:
        """Number of most likely tokens per row that all ranks together exchange for a filter."""
        return TOP_CANDIDATES * self.group.size

    def argmax(self, scores: Tensor) -> Tensor:
        """Returns the token [n] with the highest score over the `scores` [n, m] of all ranks, as
        `backends.reference.sampling.argmax_token` does for whole rows: -1 if that score is not finite."""
        scores = _not_empty(scores)
        best = scores.argmax(-1, keepdim=True)
        message = torch.cat((scores.gather(-1, best).double(), (best + self.tokens.start).double()), -1)
        values, tokens = self.group.all_gather(message).unbind(-1)  # [size, n] each
        rank = values.argmax(0, keepdim=True)  # of the NaN if a rank has one
        return tokens.gather(0, rank).masked_fill_(~values.gather(0, rank).isfinite(), -1).squeeze(0).long()

    def log_top_k(self, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Returns the `k` largest of log_softmax over the `scores` [n, m] of all ranks, as
        `backends.reference.sampling.log_top_k` does for whole rows: tokens [n, k] and log-probabilities [n, k]."""
        scores = _not_empty(scores)
        best = scores.topk(min(k, scores.shape[-1]))
        missing = (0, k - best.values.shape[-1])
        values, tokens = F.pad(best.values, missing, value=NEG_INF), F.pad(best.indices + self.tokens.start, missing)
        message = torch.cat((values.double(), tokens.double(), scores.logsumexp(-1, keepdim=True).double()), -1)
        values, tokens, total = self.group.all_gather(message).split((k, k, 1), -1)
        values, tokens = _concat_ranks(values), _concat_ranks(tokens)
        values, order = values.sort(dim=-1, descending=True, stable=True)
        logprobs = values[:, :k] - total.logsumexp(0)
        # never above 0 and never NaN
        logprobs = logprobs.nan_to_num_(-math.inf, neginf=-math.inf).clamp_max_(0)
        return tokens.gather(-1, order[:, :k]).long(), logprobs.to(scores.dtype)

    def values(self, scores: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the scores [n, j] of arbitrary `tokens` [n, j], looked up in the `scores` [n, m] of all ranks, and
        the logsumexp [n, 1] of each row over all ranks."""
        scores = _not_empty(scores)
        own = tokens - self.tokens.start
        inside = (own >= 0) & (own < len(self.tokens))
        values = scores.gather(-1, own.clamp(0, scores.shape[-1] - 1)).masked_fill(~inside, NEG_INF)
        message = torch.cat((values, scores.logsumexp(-1, keepdim=True)), -1)
        values, totals = self.group.all_gather(message).split((tokens.shape[-1], 1), -1)
        return values.amax(0), totals.logsumexp(0)

    def count_above(self, scores: Tensor, limits: Tensor) -> Tensor:
        """Returns for each row how many of the `scores` [n, m] of all ranks exceed its limit [n, 1], as [n]."""
        return self.group.all_gather(count_above(scores, limits).double()).sum(0).long()

    def apply_filters(self, logits: Tensor, params: LogitsParams, check_all: FastPathCheck = all_on_host) -> Tensor:
        """Applies `filters.apply_filters` to this rank's `logits` [n, m]. Gathers whole rows only if `check_all` does
        not confirm that the exchanged top candidates suffice."""
        limit, certain = self._filter_threshold(logits, params)
        if check_all(certain):
            return logits.masked_fill(logits < limit, NEG_INF)
        padded = F.pad(logits, (0, self.width - logits.shape[-1]), value=NEG_INF)
        whole = _concat_ranks(self.group.all_gather(padded))[:, : self.vocab]
        return filters.apply_filters(whole, params)[:, self.tokens.start : self.tokens.stop]

    def _filter_threshold(self, logits: Tensor, params: LogitsParams) -> tuple[Tensor, Tensor]:
        """Returns the smallest logit [n, 1] that the filters keep, and whether the exchanged candidates suffice to find
        it, bool [n, 1].

        The merged candidates are the true ranking of the row above `floor`, the largest of the ranks' last candidates,
        which is -inf if all tokens were exchanged.
        """
        head = _not_empty(logits)
        total = head.logsumexp(-1, keepdim=True)
        head = head.topk(min(TOP_CANDIDATES, head.shape[-1])).values
        head = F.pad(head, (0, TOP_CANDIDATES - head.shape[-1]), value=NEG_INF)
        heads, totals = self.group.all_gather(torch.cat((head, total), -1)).split((TOP_CANDIDATES, 1), -1)
        floor = heads[:, :, -1:].amax(0)
        ranked = _concat_ranks(heads).sort(-1, descending=True).values
        limit, certain = filters.head_threshold(ranked, params, self.vocab)
        cut = filters.limits_head(params, self.vocab)
        kept = ranked.masked_fill(ranked < limit, NEG_INF)
        total = torch.where(cut, kept.logsumexp(-1, keepdim=True), totals.logsumexp(0))
        last, reached = filters.top_p_threshold(kept, total, params)
        complete = floor == NEG_INF
        known = (~cut | complete | (limit > floor)) & ((params["top_p"] >= 1) | complete | (last > floor))
        return torch.maximum(limit, last), certain & reached & known


def count_above(scores: Tensor, limits: Tensor) -> Tensor:
    """Returns for each row how many of the `scores` [n, m] exceed its limit [n, 1], as [n]."""
    # The CPU sums floats faster than bools; the sums are exact below 2^24.
    return torch.gt(scores, limits, out=torch.empty(scores.shape, device=scores.device)).sum(-1).long()


def _not_empty(x: Tensor) -> Tensor:
    """Returns `x`, or for a rank without tokens one column of -inf, which is never selected."""
    return x if x.shape[-1] else x.new_full((x.shape[0], 1), NEG_INF)


def _concat_ranks(parts: Tensor) -> Tensor:
    """Concatenates the gathered columns of all ranks in rank order: [size, n, j] -> [n, size * j]."""
    return parts.transpose(0, 1).flatten(1)
