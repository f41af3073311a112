"""Sampling of the rows of particles, without device synchronisation."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from swiftspec.backends.reference import Backend
from swiftspec.backends.reference.sampling import Scores
from swiftspec.params import FILTERS, PENALTIES, SamplingParams
from swiftspec.sampling import filters
from swiftspec.sampling.logits_processor import LogitsProcessor


def _always(_holds: Tensor) -> bool:
    return True


class RowSampler(LogitsProcessor):
    """Sampler of the rows of requests with equal parameters: processes raw logits to the distributions p of the target
    and q of the draft, and draws tokens from them.

    Filters apply to p only, because q must reach every token that p reaches (smc/weights.py). Penalties and
    `min_tokens` apply to both: if `penalised`, the input of all other methods is the output of `penalise` instead of
    raw logits. `key`: equal for requests that can share a sampler.
    """

    def __init__(self, params: SamplingParams, vocab: int, device: torch.device, ops: Backend) -> None:
        super().__init__(params, vocab, device, ops)
        self.key = row_sampler_key(params)
        self.penalised = params.penalised or params.min_tokens > 0  # logits depend on the preceding tokens
        self._late_bias = None if self.penalised else self.bias  # of `target`, `tempered`, `draw` and `log_probs`
        # top_p may need all tokens, which is known on the device only; the other filters do not need more than top_k
        self.num_candidates = vocab if params.top_p < 1 else max(params.top_k, 1)
        self.check_all = _always  # without synchronisation

    def penalise(self, logits: Tensor, prompts: Tensor, counts: Tensor, ends: Tensor) -> Tensor:
        """Applies `min_tokens`, bias and penalties to raw logits [groups, ..., N, at least V] and returns [groups, ...,
        N, V]. Unless `penalised` it applies none of them and only cuts the logits to the vocabulary.

        `prompts`: [groups, V] bool, whether a token occurs in the group's prompt.
        `counts`: [groups, ..., N, V], occurrences of each token in the output before the row's next token.
        `ends`: [groups, V] bool, the tokens that `min_tokens` excludes.
        """
        logits = logits[..., : self.vocab]
        if not self.penalised:
            return logits
        per_group = len(prompts), *[1] * (logits.dim() - 2), self.vocab
        if self.params.min_tokens > 0:
            early = counts.sum(-1, keepdim=True) < self.params.min_tokens
            logits = logits.masked_fill(ends.view(per_group) & early, filters.NEG_INF)
        return self.apply_penalties(self.add_bias(logits), prompts.view(per_group), counts)

    def tempered(self, logits: Tensor) -> Tensor:
        """Returns the draft's processed logits [rows, V]: raw logits [rows, at least V] with bias and temperature.
        Without filters, these are the target's too."""
        logits = logits[:, : self.vocab]
        return self.apply_temperature(logits if self.penalised else self.add_bias(logits))

    def target(self, logits: Tensor) -> Tensor:
        """Returns the target's processed logits [rows, V]: raw logits [rows, at least V] with bias, temperature and
        filters."""
        return self.apply_filters(self.tempered(logits))

    def draw(self, logits: Tensor, keys: Tensor, power: float = 1.0) -> tuple[Tensor, Tensor]:
        """Samples a token from each row, with bias and temperature, without filters.

        `logits`: raw logits [rows, at least V].
        `keys`: [rows], keys of the sampling noise.
        `power`: exponent of the distribution, which is then normalised.

        Returns the tokens [rows], -1 where logits are not finite, and their log-probabilities [rows], NaN there.
        """
        return self.ops.draw_keyed(logits, self.vocab, keys, self.raw_scores(power))

    def log_probs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Returns the log-probabilities [rows] of `tokens` [rows] under raw logits [rows, at least V] with bias and
        temperature, without filters."""
        return self.ops.log_probs(logits, self.vocab, tokens, self.raw_scores())

    def raw_scores(self, power: float = 1.0) -> Scores:
        """Returns the bias and the temperature that operators apply to raw logits. `power`: see `draw`."""
        return Scores(self.params.temperature / power, self._late_bias)


def row_sampler_key(params: SamplingParams) -> Hashable:
    """Returns a key that is equal for requests whose logits are processed alike, so that one sampler can serve all of
    them."""
    rules = tuple(params.logit_bias.items()), params.allowed_token_ids, params.bad_words_ids, params.min_tokens
    return tuple(params.values_of(("temperature", *PENALTIES, *FILTERS)).values()), rules
