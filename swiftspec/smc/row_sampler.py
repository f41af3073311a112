"""Sampling of the rows of particles, without device synchronisation."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from swiftspec.backends.reference import Backend
from swiftspec.backends.reference.sampling import Scores
from swiftspec.params import FILTERS, PENALTIES, SamplingParams
from swiftspec.sampling import filters
from swiftspec.sampling.logits_params import ParameterTensors
from swiftspec.sampling.logits_processor import penalised_logits

ROW_PARAMS = ("temperature", "min_tokens", *PENALTIES, *FILTERS)  # columns of `SamplingTensors.params`


def _always(_holds: Tensor) -> bool:
    return True


class SamplingClass(NamedTuple):
    """The operators that process a request's logits, whatever the values of its parameters."""

    penalised: bool  # penalties or `min_tokens`: logits depend on the preceding tokens
    biased: bool
    num_candidates: int  # most likely tokens that the filters rank; 0 without filters

    @staticmethod
    def of(params: SamplingParams, vocab: int) -> SamplingClass:
        """Returns the class of a request. top_p may need all tokens, which is known on the device only; the other
        filters need no more than top_k."""
        if params.top_p < 1 or params.top_k > filters.TOP_CANDIDATES:
            ranked = vocab
        else:
            ranked = min(filters.TOP_CANDIDATES if params.top_k > 1 else 1, vocab)
        biased = bool(params.logit_bias) or params.excludes_tokens
        return SamplingClass(params.penalised or params.min_tokens > 0, biased, ranked if params.filtered else 0)


class SamplingTensors(NamedTuple):
    """The sampling parameters of sequence groups on the device, at fixed addresses, so that a CUDA graph serves
    requests with other values. Their first dimension is the group."""

    params: Tensor  # [groups, columns of ROW_PARAMS] float64
    scalars: Tensor  # [groups, 3] float64, see `reference.Scores`
    bias: Tensor  # [groups, V] float32
    prompts: Tensor  # [groups, V] bool, the tokens of each prompt
    suppressed: Tensor  # [groups, V] bool, the tokens that `min_tokens` excludes

    def part(self, groups: slice) -> SamplingTensors:
        """Returns views of some groups."""
        return SamplingTensors(*(each[groups] for each in self))


class _Columns(ParameterTensors):
    """The parameters of groups as columns that are broadcast with logits [groups, ..., V]."""

    def __init__(self, params: Tensor, logits: Tensor) -> None:
        shape = -1, *[1] * (logits.dim() - 1)
        columns = params.to(logits.dtype).unbind(1)
        self._columns = {name: column.view(shape) for name, column in zip(ROW_PARAMS, columns, strict=True)}

    def __getitem__(self, name: str) -> Tensor:
        return self._columns[name]


class RowSampler:
    """Sampler of the rows of groups of one `SamplingClass`: processes raw logits to the distributions p of the target
    and q of the draft, and draws tokens from them. Each group has its own parameters and equally many rows.

    Filters apply to p only, because q must reach every token that p reaches (smc/weights.py). Penalties and
    `min_tokens` apply to both: if `penalised`, the input of all other methods is the output of `penalise` instead of
    raw logits.
    """

    def __init__(self, kind: SamplingClass, tensors: SamplingTensors, vocab: int, ops: Backend) -> None:
        """`tensors`: of the groups. `vocab`: size of the vocabulary without padding."""
        self.penalised, self.filtered = kind.penalised, kind.num_candidates > 0
        self._kind, self._tensors, self._vocab, self._ops = kind, tensors, vocab, ops
        self._late_bias = tensors.bias if kind.biased and not kind.penalised else None  # else `penalise` adds it

    def penalise(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Applies `min_tokens`, bias and penalties to raw logits [groups, ..., at least V] and returns [groups, ...,
        V]. Unless `penalised` it applies none of them and only cuts the logits to the vocabulary.

        `counts`: [groups, ..., V], occurrences of each token in the output before the row's next token.
        """
        logits = logits[..., : self._vocab]
        if not self.penalised:
            return logits
        tensors, columns = self._tensors, _Columns(self._tensors.params, logits)
        per_group = len(logits), *[1] * (logits.dim() - 2), self._vocab
        early = counts.sum(-1, keepdim=True) < columns["min_tokens"]
        logits = logits.masked_fill(tensors.suppressed.view(per_group) & early, filters.NEG_INF)
        if self._kind.biased:
            logits = logits + tensors.bias.view(per_group).to(logits.dtype)
        return penalised_logits(logits, columns, tensors.prompts.view(per_group), counts)

    def tempered(self, logits: Tensor) -> Tensor:
        """Returns the draft's processed logits [rows, V]: raw logits [rows, at least V] with bias and temperature.
        Without filters, these are the target's too."""
        logits = self._per_group(logits)
        if self._late_bias is not None:
            logits = logits + self._late_bias[:, None].to(logits.dtype)
        return (logits / _Columns(self._tensors.params, logits)["temperature"]).flatten(0, 1)

    def target(self, logits: Tensor) -> Tensor:
        """Returns the target's processed logits [rows, V]: raw logits [rows, at least V] with bias, temperature and
        filters."""
        logits = self._per_group(self.tempered(logits))
        if self.filtered:
            columns = _Columns(self._tensors.params, logits)
            logits = filters.apply_filters(logits, columns, _always, self._kind.num_candidates)
        return logits.flatten(0, 1)

    def draw(self, logits: Tensor, keys: Tensor, power: float = 1.0) -> tuple[Tensor, Tensor]:
        """Samples a token from each row, with bias and temperature, without filters.

        `logits`: raw logits [rows, at least V].
        `keys`: [rows], keys of the sampling noise.
        `power`: exponent of the distribution, which is then normalised.

        Returns the tokens [rows], -1 where logits are not finite, and their log-probabilities [rows], NaN there.
        """
        return self._ops.draw_keyed(logits, self._vocab, keys, self._raw_scores(power))

    def log_probs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Returns the log-probabilities [rows] of `tokens` [rows] under raw logits [rows, at least V] with bias and
        temperature, without filters."""
        return self._ops.log_probs(logits, self._vocab, tokens, self._raw_scores())

    def _raw_scores(self, power: float = 1.0) -> Scores:
        """Returns the bias and the temperature that operators apply to raw logits. `power`: see `draw`."""
        scalars = self._tensors.scalars
        return Scores(bias=self._late_bias, scalars=scalars if power == 1 else scalars / power)

    def _per_group(self, logits: Tensor) -> Tensor:
        """Returns logits [rows, at least V] as [groups, rows of each, V]."""
        return logits[:, : self._vocab].unflatten(0, (len(self._tensors.params), -1))


def row_sampler_key(params: SamplingParams) -> Hashable:
    """Returns a key that is equal for requests whose logits are processed alike."""
    rules = tuple(params.logit_bias.items()), params.allowed_token_ids, params.bad_words_ids, params.min_tokens
    return tuple(params.values_of(("temperature", *PENALTIES, *FILTERS)).values()), rules


def row_params(params: SamplingParams) -> Tensor:
    """Returns the values of ROW_PARAMS of a request, [columns] float64."""
    return torch.tensor([float(value) for value in params.values_of(ROW_PARAMS).values()], dtype=torch.float64)
