"""From logits to tokens: penalties, filters, and noise that is a function of the position (design: idea 5).

The token at absolute position p is argmax(log p_T + gumbel(seed, stream, p, token)): a pure function of prompt, seed,
sampling parameters and target logits, whatever tree looked it up. Letters: n rows, V tokens of the base vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from swiftspec.ops import reference
from swiftspec.params import SamplingParams

LogTopK = Callable[[Tensor, int], tuple[Tensor, Tensor]]

TARGET_STREAM = 0
NEG_INF = float("-inf")
_GOLDEN = 0x9E3779B9
_WORD = 0xFFFFFFFF


def _mix_int(x: int) -> int:
    """A bijective hash of 32-bit integers (two multiply-xorshift rounds); csrc/noise.h has the same."""
    x ^= x >> 16
    x = x * 0x7FEB352D & _WORD
    x ^= x >> 15
    x = x * 0x846CA68B & _WORD
    return x ^ x >> 16


def _mix_(x: Tensor) -> Tensor:
    """`_mix_int` in place on int32 tensors, whose products wrap; the masks make the shifts logical."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def row_key(seed: int, stream: int, position: int) -> int:
    """The 32-bit key of one row of noise."""
    key = _mix_int((seed + _GOLDEN) & _WORD)  # the constant keeps seed 0 off the hash's fixed point 0
    key = _mix_int(key ^ (seed >> 32 & _WORD))
    key = _mix_int((key + stream * _GOLDEN) & _WORD)
    return _mix_int(key ^ (position & _WORD))


def noise_bits(
    seed: int, stream: int, positions: Sequence[int], vocab: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Counter-based noise: [n, vocab] uint32, the same integers on every backend and rank."""
    keys = torch.tensor([row_key(seed, stream, p) for p in positions], dtype=torch.uint32).view(torch.int32).to(device)
    tokens = torch.arange(vocab, dtype=torch.int32, device=device) * (_GOLDEN - 2**32)
    bits = _mix_(keys[:, None] + tokens)
    bits ^= keys[:, None]
    return _mix_(bits).view(torch.uint32)


def gumbel(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise from uint32, -log(-log(1 - v)) with v in (0, 1): exact where it is large."""
    ceiling = 1 - 2.0**-24  # float32 would round v to 1 and the noise to -inf
    v = bits.to(dtype).add_(0.5).mul_(2.0**-32).clamp_max_(ceiling)
    return v.neg_().log1p_().neg_().log_().neg_()


class PositionNoise:
    """Gumbel rows by position, made in blocks: the nodes of a tree share a few positions, round after round."""

    BLOCK = 32

    def __init__(self, seed: int, vocab: int, device: torch.device | str, *, stream: int = TARGET_STREAM) -> None:
        self._seed, self._stream, self._vocab, self._device = seed, stream, vocab, device
        self._first = 0
        self._block = torch.empty(0, vocab)

    def rows(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """[n, V] noise of `positions` [n]."""
        low, high = (int(bound) for bound in positions.aminmax())
        end = self._first + self._block.shape[0]
        if not (self._first <= low and high < end) or self._block.dtype != dtype:
            self._first = low
            span = range(low, max(high + 1, low + self.BLOCK))
            self._block = gumbel(noise_bits(self._seed, self._stream, span, self._vocab, self._device), dtype)
        return self._block[positions - self._first]


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

    def counts(self, paths: Sequence[Sequence[int]]) -> Tensor:
        """[n, V] occurrences in the output followed by each row's unverified path."""
        counts = self.output.repeat(len(paths), 1)
        for row, path in zip(counts, paths, strict=True):
            if path:
                row.index_add_(0, torch.tensor(path, device=row.device), torch.ones(len(path), device=row.device))
        return counts


class Sampler:
    """Shapes logits after one request's parameters; draws the target's tokens and ranks the draft's children."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab: int, device: torch.device | str) -> None:
        self.params = params
        self.vocab = vocab
        self.noise = PositionNoise(params.seed, vocab, device)
        self.history = History(prompt, vocab, device) if params.penalised else None
        self._bias: Tensor | None = None
        if params.logit_bias:
            bias = torch.zeros(vocab)
            bias[list(params.logit_bias)] = torch.tensor(list(params.logit_bias.values()))
            self._bias = bias.to(device)

    def observe(self, tokens: Sequence[int]) -> None:
        """Takes verified tokens of the output into the penalties' counts."""
        if self.history is not None:
            self.history.extend(tokens)

    def shape(self, logits: Tensor, paths: Sequence[Sequence[int]] | None) -> Tensor:
        """[n, >= V] raw logits to [n, V] logits of the distribution that is sampled; filtered tokens are -inf.

        `paths`: per row, the tokens between the last verified one (not included) and the row's own; needed for
        penalties only. Greedy requests keep their scale and are not filtered: the argmax is the same.
        """
        p = self.params
        logits = logits[:, : self.vocab]
        if self._bias is not None:
            logits = logits + self._bias.to(logits.dtype)
        if self.history is not None:
            assert paths is not None
            logits = self._penalise(logits, self.history, self.history.counts(paths))
        if p.greedy:
            return logits
        logits = logits / p.temperature
        if p.min_p > 0:
            limit = logits.amax(-1, keepdim=True) + torch.log(torch.tensor(p.min_p))
            logits = logits.masked_fill(logits < limit, NEG_INF)
        if 0 < p.top_k < self.vocab:
            limit = logits.topk(p.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < limit, NEG_INF)
        return top_p(logits, p.top_p) if p.top_p < 1 else logits

    def _penalise(self, logits: Tensor, history: History, counts: Tensor) -> Tensor:
        p = self.params
        seen = history.prompt | (counts > 0)
        scaled = torch.where(logits > 0, logits / p.repetition_penalty, logits * p.repetition_penalty)
        logits = torch.where(seen, scaled, logits)
        counts = counts.to(logits.dtype)
        return logits - p.frequency_penalty * counts - p.presence_penalty * (counts > 0)

    def draw(self, logits: Tensor, paths: Sequence[Sequence[int]] | None, positions: Tensor) -> Tensor:
        """The target's tokens [n] after rows at `positions` [n], from raw logits [n, >= V]."""
        shaped = self.shape(logits, paths)
        if not self.params.greedy:
            shaped = shaped + self.noise.rows(positions + 1, shaped.dtype)
        return shaped.argmax(-1)

    def children(
        self,
        logits: Tensor,
        paths: Sequence[Sequence[int]] | None,
        positions: Tensor,
        *,
        k: int,
        tau: float | None,
        log_top_k: LogTopK = reference.log_top_k,
    ) -> tuple[Tensor, Tensor]:
        """The k best children of draft rows: tokens [n, k] and log-probabilities [n, k], likeliest first.

        Uncoupled (`tau` None): log q after the target's own shaping. Coupled: log_softmax((log q + gumbel) / tau) under
        the noise that the target will use there, so the draft looks where the target will look.
        """
        shaped = self.shape(logits, paths)
        if tau is not None and not self.params.greedy:
            shaped = (shaped + self.noise.rows(positions + 1, shaped.dtype)) / tau
        return log_top_k(shaped, min(k, self.vocab))


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keeps the fewest likeliest tokens whose probabilities reach p; tokens tied with the last kept one stay."""
    head = min(256, logits.shape[-1])  # nearly always enough, and a sort of the whole vocabulary costs ten times more
    total = logits.logsumexp(-1, keepdim=True)
    ranked = logits.topk(head).values
    if head < logits.shape[-1] and bool(((ranked - total).exp().sum(-1) < p).any()):
        ranked = logits.sort(-1, descending=True).values
    mass = (ranked - total).exp()
    before = mass.cumsum(-1) - mass
    last = (before < p).sum(-1, keepdim=True) - 1
    return logits.masked_fill(logits < ranked.gather(-1, last), NEG_INF)
