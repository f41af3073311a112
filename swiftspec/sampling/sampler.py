"""From logits to tokens: bias, penalties, filters, and noise that is a function of the position (design: idea 5).

The token at absolute position p is argmax(log p_T + gumbel(seed, stream, p, token)): a pure function of prompt, seed,
sampling parameters and target logits, whatever tree looked it up. Letters: n rows, V tokens of the base vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from swiftspec.backends import reference
from swiftspec.backends.reference import Scores
from swiftspec.params import SamplingParams
from swiftspec.sampling import filters
from swiftspec.sampling.noise import TARGET_STREAM, PositionNoise
from swiftspec.sampling.vocab import Group, VocabShard

Rows = Callable[[Tensor, range, torch.dtype], tuple[Tensor, Tensor]]  # as PositionNoise.rows


class Ops(Protocol):
    """The fused passes over whole rows of logits; swiftspec.backends.reference defines them."""

    def gumbel_rows(self, seed: int, stream: int, positions: Tensor, tokens: range, /) -> Tensor: ...
    def draw(self, logits: Tensor, vocab: int, scores: Scores, /) -> Tensor: ...
    def children(self, logits: Tensor, vocab: int, k: int, scores: Scores, /) -> tuple[Tensor, Tensor]: ...
    def gumbel_keyed(self, keys: Tensor, tokens: range, /) -> Tensor: ...
    def log_probs(self, logits: Tensor, vocab: int, tokens: Tensor, scores: Scores, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Lineage:
    """The paths of rows whose tokens are each other's, without the host."""

    tokens: Tensor  # [n] int64
    above: Tensor  # [n, n] bool: whether column j's token is on row i's path


Paths = Sequence[Sequence[int]] | Lineage


class History:
    """The tokens that penalties count, [V] each: those of the prompt, and how often each occurs in the output."""

    def __init__(self, prompt: Sequence[int], vocab: int, device: torch.device | str) -> None:
        self.prompt = torch.zeros(vocab, dtype=torch.bool, device=device)
        self.prompt[torch.tensor(list(prompt), dtype=torch.int64, device=device)] = True
        self.output = torch.zeros(vocab, device=device)

    def extend(self, tokens: Sequence[int]) -> None:
        """Counts verified tokens of the output."""
        index = torch.tensor(list(tokens), dtype=torch.int64, device=self.output.device)
        self.output.index_add_(0, index, torch.ones(len(tokens), device=self.output.device))

    def take(self, other: History) -> None:
        """Those of another request, in the same tensors."""
        self.prompt.copy_(other.prompt)
        self.output.copy_(other.output)

    def counts(self, paths: Paths) -> Tensor:
        """[n, V] occurrences in the output followed by each row's unverified path."""
        if isinstance(paths, Lineage):
            counts = self.output.repeat(len(paths.tokens), 1)
            return counts.index_add_(1, paths.tokens, paths.above.to(counts.dtype))
        counts = self.output.repeat(len(paths), 1)
        for row, path in zip(counts, paths, strict=True):
            if path:
                row.index_add_(0, torch.tensor(path, device=row.device), torch.ones(len(path), device=row.device))
        return counts


class Sampler:
    """Shapes logits after one request's parameters; draws the target's tokens and ranks the draft's children.

    With a group of ranks, logits are this rank's columns of the head [n, width], as many on every rank; `draw` and
    `children` answer alike on all of them, and all must ask. m: the tokens of this rank (without a group, V).
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab: int,
        device: torch.device | str,
        group: Group | None = None,
        ops: Ops = reference,
        *,
        rows: Rows | None = None,
        sure: filters.Sure = filters.every,
    ) -> None:
        """`rows` and `sure` are for samplers that must not look at the device: where the target's noise comes from, if
        not from `noise`, and whether filters may go their short way."""
        self.params = params
        self.vocab = vocab
        self.group = group
        self._device, self._ops = device, ops
        self.noise = self.noise_of(TARGET_STREAM)
        self._rows, self._sure = rows or self.noise.rows, sure
        self.history = History(prompt, vocab, device) if params.penalised else None
        self._bias: Tensor | None = None
        if params.logit_bias:
            bias = torch.zeros(vocab)
            bias[list(params.logit_bias)] = torch.tensor(list(params.logit_bias.values()))
            self._bias = bias.to(device)

    def noise_of(self, stream: int) -> PositionNoise:
        """The noise of one of the request's streams."""
        return PositionNoise(self.params.seed, self._device, stream=stream, gumbel_rows=self._ops.gumbel_rows)

    def observe(self, tokens: Sequence[int]) -> None:
        """Takes verified tokens of the output into the penalties' counts."""
        if self.history is not None:
            self.history.extend(tokens)

    @property
    def plain(self) -> bool:
        """Whether all that shapes logits is a temperature, the same for every token and every path."""
        p = self.params
        return self.history is None and self._bias is None and (p.greedy or not filters.active(p))

    def scoring(self, rounds: Any | None) -> Any:
        """This request's parameters as `rounds` takes them; None where Python must see the logits: for penalties and
        filters."""
        p = self.params
        if rounds is None or self.history is not None or (filters.active(p) and not p.greedy):
            return None
        temperature = 1.0 if p.greedy else p.temperature
        return rounds.scoring(self.vocab, temperature, self._bias, not p.greedy, p.seed, TARGET_STREAM)

    def scores(self, power: float = 1.0, noise: Tensor | None = None, rows: Tensor | None = None) -> Scores:
        """What the operators make of raw logits for a request without penalties and filters; of its distribution to
        that power."""
        return Scores(self.params.temperature / power, self._bias, noise, rows)

    def shape(self, logits: Tensor, paths: Paths | None) -> Tensor:
        """Raw logits [n, >= V or width] to logits [n, m] of the distribution that is sampled; filtered tokens are -inf.

        `paths`: per row, the tokens between the last verified one (not included) and the row's own; needed for
        penalties only. Greedy requests keep their scale and are not filtered: the argmax is the same.
        """
        p, shard = self.params, self.shard(logits)
        here = slice(0, self.vocab) if shard is None else slice(shard.tokens.start, shard.tokens.stop)
        logits = logits[:, : here.stop - here.start]
        if self._bias is not None:
            logits = logits + self._bias[here].to(logits.dtype)
        if self.history is not None:
            assert paths is not None
            logits = self._penalise(logits, self.history.prompt[here], self.history.counts(paths)[:, here])
        if p.greedy:
            return logits
        logits = logits / p.temperature
        return filters.keep(logits, p, self._sure) if shard is None else shard.keep(logits, p, self._sure)

    def _penalise(self, logits: Tensor, prompt: Tensor, counts: Tensor) -> Tensor:
        p = self.params
        seen = prompt | (counts > 0)
        scaled = torch.where(logits > 0, logits / p.repetition_penalty, logits * p.repetition_penalty)
        logits = torch.where(seen, scaled, logits)
        counts = counts.to(logits.dtype)
        return logits - p.frequency_penalty * counts - p.presence_penalty * (counts > 0)

    def draw(self, logits: Tensor, paths: Paths | None, positions: Tensor) -> Tensor:
        """The target's tokens [n] after rows at `positions` [n], from raw logits."""
        noisy = not self.params.greedy
        shard = self.shard(logits)
        if shard is None:
            return self._ops.draw(*self._scored(logits, paths, positions if noisy else None, 1.0))
        shaped = self.shape(logits, paths)
        return shard.argmax(shaped + self._noise(shaped, shard, positions) if noisy else shaped)

    def children(
        self,
        logits: Tensor,
        paths: Paths | None,
        positions: Tensor,
        *,
        k: int,
        coupled: bool = False,
        tau: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """The k best children of draft rows: tokens [n, k] and log-probabilities [n, k], likeliest first.

        Uncoupled: log_softmax(log q / tau), q after the target's own shaping. Coupled: log_softmax((log q + gumbel) /
        tau) under the noise that the target will use there, so the draft looks where the target will look.
        """
        k = min(k, self.vocab)
        noisy = coupled and not self.params.greedy
        shard = self.shard(logits)
        if shard is None:
            logits, vocab, scores = self._scored(logits, paths, positions if noisy else None, tau)
            return self._ops.children(logits, vocab, k, scores)
        shaped = self.shape(logits, paths)
        if noisy:
            shaped = shaped + self._noise(shaped, shard, positions)
        return shard.log_top_k(shaped / tau, k)

    def _scored(
        self, logits: Tensor, paths: Paths | None, positions: Tensor | None, tau: float
    ) -> tuple[Tensor, int, Scores]:
        """What the operators take: they apply bias and temperature themselves where nothing has to come in between."""
        p, temperature, bias = self.params, 1.0, None
        if self.history is not None or (filters.active(p) and not p.greedy):
            logits = self.shape(logits, paths)
        else:
            temperature, bias = 1.0 if p.greedy else p.temperature, self._bias
        if positions is None:
            return logits, self.vocab, Scores(temperature * tau, bias)
        noise, rows = self._rows(positions + 1, range(self.vocab), logits.dtype)
        return logits, self.vocab, Scores(temperature, bias, noise, rows, tau)

    def _noise(self, shaped: Tensor, shard: VocabShard, positions: Tensor) -> Tensor:
        """[n, m] for the tokens after `positions`."""
        block, rows = self._rows(positions + 1, shard.tokens, shaped.dtype)
        return block[rows]

    def shard(self, logits: Tensor) -> VocabShard | None:
        """This rank's part of the vocabulary; None where rows are whole."""
        return None if self.group is None else VocabShard(self.group, logits.shape[-1], self.vocab)
