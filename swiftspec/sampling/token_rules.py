"""Token rules: `allowed_token_ids`, `bad_words_ids` and `min_tokens`, which exclude tokens from the distribution.

What they exclude is a function of the output so far, so target rows and draft children are masked identically, and the
output equals that of autoregressive decoding under the same rules. Letters: n paths, V tokens of the base vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.params import SamplingParams
from swiftspec.sampling.logits_processor import always_allowed
from swiftspec.sampling.sampler import Paths, TokenConstraint

TokenMask = NDArray[np.bool_]  # [V], True where a token is allowed


class TokenRules:
    """Token constraint (`sampler.TokenConstraint`) of one request: its token rules, applied to the tokens that `base`,
    such as a grammar, allows. A rule that would leave no token is not applied at that position."""

    def __init__(
        self, params: SamplingParams, vocab: int, eos: Collection[int], base: TokenConstraint | None = None
    ) -> None:
        """`eos`: the end-of-text tokens that `min_tokens` excludes in addition to the stop tokens."""
        self._base, self._vocab, self._min_tokens = base, vocab, params.min_tokens
        self._always = always_allowed(params, vocab)
        self._ends = [token for token in {*eos, *params.stop_token_ids} if token < vocab]
        self._words = params.bad_sequences
        self._longest = max(map(len, self._words), default=1) - 1  # most tokens that precede the last one of a sequence
        self._tail: tuple[int, ...] = ()  # the last verified output tokens, `_longest` at most
        self._count = 0  # verified output tokens

    def observe(self, tokens: Sequence[int]) -> None:
        """Advances by verified output tokens."""
        if self._base is not None:
            self._base.observe(tokens)
        self._count += len(tokens)
        self._tail = self._last((*self._tail, *tokens))

    def allowed_mask(self, paths: Paths) -> Tensor:
        """Returns the allowed tokens after each path, [n, V] bool."""
        if self._base is None:
            rows = np.ones((len(paths), self._vocab), np.bool_)
        else:
            rows = self._base.allowed_mask(paths).numpy().copy()
        for row, path in zip(rows, paths, strict=True):
            for excluded in self._exclusions(path):
                left = row & ~excluded
                if left.any():
                    row[:] = left
        return torch.from_numpy(rows)

    def bitmask(self, paths: Paths) -> NDArray[np.uint8]:
        """Returns `allowed_mask` as uint8 bitmasks [n, bytes], the lowest bit of each byte first."""
        return np.packbits(self.allowed_mask(paths).numpy(), axis=-1, bitorder="little")

    def _exclusions(self, path: Sequence[int]) -> Iterator[TokenMask]:
        """Yields the tokens that each rule excludes after a path."""
        if self._always is not None:
            yield ~self._always
        text = self._last((*self._tail, *path))
        last = [word[-1] for word in self._words if text[len(text) - len(word) + 1 :] == word[:-1]]
        if last:
            yield self._mask_of(last)
        if self._count + len(path) < self._min_tokens:
            yield self._mask_of(self._ends)

    def _last(self, text: tuple[int, ...]) -> tuple[int, ...]:
        return text[max(len(text) - self._longest, 0) :]

    def _mask_of(self, tokens: Sequence[int]) -> TokenMask:
        mask = np.zeros(self._vocab, np.bool_)
        mask[list(tokens)] = True
        return mask
