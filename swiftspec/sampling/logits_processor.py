"""Logits processing: bias, penalties, temperature and filters on rows of logits, under one set of sampling parameters.

The nodes of a tree (`Sampler`) go through the steps of `LogitsProcessor`. The rows of particles (`RowSampler`) go
through the same steps, with parameters per request. Letters: n rows of logits, V tokens of the base vocabulary, m of
them on this rank (V without a tensor-parallel group).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.backends.reference import Backend
from swiftspec.params import SamplingParams
from swiftspec.sampling import filters
from swiftspec.sampling.logits_params import LogitsParams, ParameterTensors


class ShardedVocab(Protocol):
    """One rank's part of a vocabulary that is sharded over a group; see `VocabShard` in sampling/vocab.py."""

    @property
    def tokens(self) -> range: ...  # token ids of this rank
    @property
    def num_exchanged(
        self,
    ) -> int: ...  # number of most likely tokens that the ranks exchange; enough for most filters
    def argmax(self, scores: Tensor, /) -> Tensor: ...
    def log_top_k(self, scores: Tensor, k: int, /) -> tuple[Tensor, Tensor]: ...
    def values(self, scores: Tensor, tokens: Tensor, /) -> tuple[Tensor, Tensor]: ...
    def count_above(self, scores: Tensor, limits: Tensor, /) -> Tensor: ...
    def apply_filters(self, logits: Tensor, params: LogitsParams, sure: filters.FastPathCheck, /) -> Tensor: ...


def always_allowed(params: SamplingParams, vocab: int) -> NDArray[np.bool_] | None:
    """Returns the tokens [V] that `allowed_token_ids` and bad words of one token allow; None if they allow all."""
    if not params.excludes_tokens:
        return None
    allowed = np.full(vocab, params.allowed_token_ids is None)
    allowed[list(params.allowed_token_ids or ())] = True
    allowed[list(params.bad_tokens)] = False
    return allowed


def logits_bias(params: SamplingParams, vocab: int) -> Tensor | None:
    """Returns what is added to the logits of every position, [V] float32: -inf for tokens that are excluded at every
    position. None if no token has a bias."""
    # with a grammar, `TokenRules` excludes these tokens, since they may be the only ones that the grammar allows
    allowed = None if params.grammar is not None else always_allowed(params, vocab)
    if not params.logit_bias and allowed is None:
        return None
    bias = torch.zeros(vocab)
    bias[list(params.logit_bias)] = torch.tensor(list(params.logit_bias.values()))
    if allowed is not None:
        bias[torch.from_numpy(~allowed)] = filters.NEG_INF
    return bias


def penalised_logits(logits: Tensor, values: ParameterTensors, prompt: Tensor, counts: Tensor) -> Tensor:
    """Returns logits [..., m] with the penalties `values`. `prompt`: whether the prompt contains each token, bool.
    `counts` [..., m]: occurrences of each token in the output before the row's next token."""
    seen = prompt | (counts > 0)
    repetition = values["repetition_penalty"]
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, scaled, logits)
    counts = counts.to(logits.dtype)
    return logits - values["frequency_penalty"] * counts - values["presence_penalty"] * (counts > 0).to(logits.dtype)


class LogitsProcessor:
    """The steps of logits processing, in their order: `add_bias`, `apply_penalties`, `apply_temperature`,
    `apply_filters`.

    `shard`: this rank's part of the vocabulary in a tensor-parallel group; logits are then this rank's columns of the
    LM head. The owner of a CUDA graph replaces `bias`, `filtered` and `check_all`.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab: int,
        device: torch.device | str,
        ops: Backend,
        shard: ShardedVocab | None = None,
    ) -> None:
        self.params, self.vocab, self.device, self.shard = params, vocab, device, shard
        self.ops = ops
        self.columns = slice(0, vocab) if shard is None else slice(shard.tokens.start, shard.tokens.stop)
        self.greedy, self.filtered = params.greedy, params.filtered
        self.values = LogitsParams(device)
        self.values.load(params, noisy=not params.greedy)
        self.check_all = filters.all_on_host  # decides whether filters may use their fast path
        bias = logits_bias(params, vocab)
        self.bias = None if bias is None else bias.to(device)

    def add_bias(self, logits: Tensor) -> Tensor:
        """Adds the bias to logits [..., m]."""
        return logits if self.bias is None else logits + self.bias[self.columns].to(logits.dtype)

    def apply_penalties(self, logits: Tensor, prompt: Tensor, counts: Tensor) -> Tensor:
        """Applies the penalties to logits [..., m]; see `penalised_logits`."""
        return penalised_logits(logits, self.values, prompt, counts)

    def apply_temperature(self, logits: Tensor) -> Tensor:
        """Divides logits [n, m] by the temperature, unless it is 0, which does not change the argmax."""
        return logits if self.greedy else logits / self.values["temperature"]

    def apply_filters(self, logits: Tensor) -> Tensor:
        """Sets the logits [n, m] of tokens that a filter excludes to -inf. No filter changes the argmax, so they do not
        apply at temperature 0."""
        if self.greedy or not self.filtered:
            return logits
        if self.shard is None:
            return filters.apply_filters(logits, self.values, self.check_all)
        return self.shard.apply_filters(logits, self.values, self.check_all)
