"""From logits to tokens: bias, penalties, temperature, filters, and noise that is a function of the position.

The token at absolute position p is argmax(log p_T + gumbel(seed, stream, p, token)): a pure function of prompt, seed,
sampling parameters and target logits, whatever tree looked it up. Letters: n rows, V tokens of the base vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from swiftspec.backends import reference
from swiftspec.backends.reference import Scores
from swiftspec.params import SamplingParams
from swiftspec.sampling import filters
from swiftspec.sampling.noise import TARGET_STREAM, PositionNoise

NoiseRows = Callable[[Tensor, range, torch.dtype], tuple[Tensor, Tensor]]  # as PositionNoise.rows
Paths = Sequence[Sequence[int]]  # of each row, the tokens between the last verified one and the row's own, both ways


class SamplerOps(Protocol):
    """The fused passes over whole rows of logits; swiftspec.backends.reference defines them."""

    def gumbel_rows(self, seed: int, stream: int, positions: Tensor, tokens: range, /) -> Tensor: ...
    def draw(self, logits: Tensor, vocab: int, scores: Scores, /) -> Tensor: ...
    def children(self, logits: Tensor, vocab: int, k: int, scores: Scores, /) -> tuple[Tensor, Tensor]: ...
    def draw_keyed(self, logits: Tensor, vocab: int, keys: Tensor, scores: Scores, /) -> tuple[Tensor, Tensor]: ...
    def log_probs(self, logits: Tensor, vocab: int, tokens: Tensor, scores: Scores, /) -> Tensor: ...


class ShardedVocab(Protocol):
    """One rank's part of a vocabulary that is cut over a group of ranks; sampling/vocab.py defines it."""

    @property
    def tokens(self) -> range: ...  # of this rank
    @property
    def num_exchanged(
        self,
    ) -> int: ...  # how many of the likeliest tokens the ranks exchange, which settle most filters
    def argmax(self, scores: Tensor, /) -> Tensor: ...
    def log_top_k(self, scores: Tensor, k: int, /) -> tuple[Tensor, Tensor]: ...
    def values(self, scores: Tensor, tokens: Tensor, /) -> tuple[Tensor, Tensor]: ...
    def apply_filters(self, logits: Tensor, params: SamplingParams, sure: filters.CheckAll, /) -> Tensor: ...


class History:
    """The tokens that penalties count, [V] each: those of the prompt, and how often each occurs in the output."""

    def __init__(self, prompt: Sequence[int], vocab: int, device: torch.device | str) -> None:
        self.prompt = torch.zeros(vocab, dtype=torch.bool, device=device)
        self.prompt[torch.tensor(list(prompt), dtype=torch.int64, device=device)] = True
        self.output = torch.zeros(vocab, device=device)

    def observe(self, tokens: Sequence[int]) -> None:
        """Counts verified tokens of the output."""
        index = torch.tensor(list(tokens), dtype=torch.int64, device=self.output.device)
        self.output.index_add_(0, index, torch.ones(len(tokens), device=self.output.device))

    def counts(self, paths: Paths) -> Tensor:
        """[n, V] occurrences in the output followed by each row's unverified path."""
        counts = self.output.repeat(len(paths), 1)
        for row, path in zip(counts, paths, strict=True):
            if path:
                row.index_add_(0, torch.tensor(path, device=row.device), torch.ones(len(path), device=row.device))
        return counts


class TokenConstraint(Protocol):
    """Which tokens may follow, of whoever has a word in that: a grammar (sampling/grammar.py)."""

    def allowed_mask(self, paths: Paths, /) -> Tensor: ...  # [n, V] bool, after each path below the last verified token
    def bitmask(self, paths: Paths, /) -> Any: ...  # the same as numpy's uint8 [n, bytes], a byte's lowest bit first
    def observe(self, tokens: Sequence[int], /) -> None: ...  # verified tokens


class Sampler:
    """Shapes logits after one request's parameters; draws the target's tokens and ranks the draft's children.

    In a group of ranks logits are this rank's columns of the head [n, width], as many on every rank, and `shard` says
    which; `draw` and `children` answer alike on all ranks, and all must ask. m: the tokens of this rank (V if alone).
    """

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], vocab: int, device: torch.device | str,
        ops: SamplerOps = reference, shard: ShardedVocab | None = None, constraint: TokenConstraint | None = None,
    ) -> None:  # fmt: skip
        self.params, self.vocab, self.shard, self.constraint = params, vocab, shard, constraint
        self.device, self._ops = device, ops
        self.noise = self.noise_of(TARGET_STREAM)
        self.noise_rows: NoiseRows = self.noise.rows
        self.check_all = filters.all_on_host  # whether filters may go their short way
        self.history = History(prompt, vocab, device) if params.penalised else None
        self.bias: Tensor | None = None  # [V] float32
        if params.logit_bias:
            bias = torch.zeros(vocab)
            bias[list(params.logit_bias)] = torch.tensor(list(params.logit_bias.values()))
            self.bias = bias.to(device)

    @property
    def needs_paths(self) -> bool:
        """Whether a row's logits depend on the tokens of its path."""
        return self.history is not None or self.constraint is not None

    def noise_of(self, stream: int) -> PositionNoise:
        """The noise of one of the request's streams."""
        return PositionNoise(self.params.seed, self.device, stream=stream, gumbel_rows=self._ops.gumbel_rows)

    def observe(self, tokens: Sequence[int]) -> None:
        """Told of verified tokens of the output."""
        for follower in (self.history, self.constraint):
            if follower is not None:
                follower.observe(tokens)

    def process_logits(self, logits: Tensor, paths: Paths | None) -> Tensor:
        """Raw logits [n, >= V or width] to logits [n, m] of the distribution that is sampled; filtered tokens are -inf.

        `paths`: where `by_path`. Greedy requests keep their scale and are not filtered: the argmax is the same.
        """
        p, shard = self.params, self.shard
        here = slice(0, self.vocab) if shard is None else slice(shard.tokens.start, shard.tokens.stop)
        logits = self._apply_constraint(logits[:, : here.stop - here.start], paths, here)
        if self.bias is not None:
            logits = logits + self.bias[here].to(logits.dtype)
        if self.history is not None:
            assert paths is not None
            logits = self.apply_penalties(logits, self.history.prompt[here], self.history.counts(paths)[:, here])
        if p.greedy:
            return logits
        logits = logits / p.temperature
        return (
            filters.apply_filters(logits, p, self.check_all)
            if shard is None
            else shard.apply_filters(logits, p, self.check_all)
        )

    def _apply_constraint(self, logits: Tensor, paths: Paths | None, here: slice) -> Tensor:
        """Without the tokens that the rules forbid; logits [n, m] of the tokens `here`."""
        if self.constraint is None:
            return logits
        assert paths is not None
        return logits.masked_fill(~self.constraint.allowed_mask(paths)[:, here].to(logits.device), filters.NEG_INF)

    def apply_penalties(self, logits: Tensor, prompt: Tensor, counts: Tensor) -> Tensor:
        p = self.params
        seen = prompt | (counts > 0)
        scaled = torch.where(logits > 0, logits / p.repetition_penalty, logits * p.repetition_penalty)
        logits = torch.where(seen, scaled, logits)
        counts = counts.to(logits.dtype)
        return logits - p.frequency_penalty * counts - p.presence_penalty * (counts > 0)

    def draw(self, logits: Tensor, paths: Paths | None, positions: Tensor) -> Tensor:
        """The target's tokens [n] after rows at `positions` [n], from raw logits."""
        noisy = not self.params.greedy
        if self.shard is None:
            return self._ops.draw(*self._operator_inputs(logits, paths, positions if noisy else None, 1.0))
        shaped = self.process_logits(logits, paths)
        return self.shard.argmax(shaped + self._noise(shaped, self.shard, positions) if noisy else shaped)

    def children(
        self, logits: Tensor, paths: Paths | None, positions: Tensor, *, k: int, coupled: bool = False, tau: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """The k best children of draft rows: tokens [n, k] and log-probabilities [n, k], likeliest first.

        Uncoupled: log_softmax(log q / tau), q after the target's own shaping. Coupled: log_softmax((log q + gumbel) /
        tau) under the noise that the target will use there, so the draft looks where the target will look.
        """
        k = min(k, self.vocab)
        noisy = coupled and not self.params.greedy
        if self.shard is None:
            logits, vocab, scores = self._operator_inputs(logits, paths, positions if noisy else None, tau)
            return self._ops.children(logits, vocab, k, scores)
        shaped = self.process_logits(logits, paths)
        if noisy:
            shaped = shaped + self._noise(shaped, self.shard, positions)
        return self.shard.log_top_k(shaped / tau, k)

    def _operator_inputs(
        self, logits: Tensor, paths: Paths | None, positions: Tensor | None, tau: float
    ) -> tuple[Tensor, int, Scores]:
        """What the operators take: they apply bias and temperature themselves where nothing has to come in between."""
        p, temperature, bias = self.params, 1.0, None
        if self.history is not None or p.filtered:
            logits = self.process_logits(logits, paths)
        else:
            logits = self._apply_constraint(logits[:, : self.vocab], paths, slice(self.vocab))
            temperature, bias = 1.0 if p.greedy else p.temperature, self.bias
        if positions is None:
            return logits, self.vocab, Scores(temperature * tau, bias)
        noise, rows = self.noise_rows(positions + 1, range(self.vocab), logits.dtype)
        return logits, self.vocab, Scores(temperature, bias, noise, rows, tau)

    def _noise(self, shaped: Tensor, shard: ShardedVocab, positions: Tensor) -> Tensor:
        """[n, m] for the tokens after `positions`."""
        block, rows = self.noise_rows(positions + 1, shard.tokens, shaped.dtype)
        return block[rows]
