"""Token constraints that no grammar can express, over any vocabulary."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from swiftspec.sampling.sampler import Paths


class DiceRules:
    """A random third of the tokens is allowed, as a function of the whole output, including at least one of the first
    ones."""

    def __init__(self, vocab: int) -> None:
        self.vocab, self.text = vocab, tuple[int, ...]()

    def observe(self, tokens: Sequence[int]) -> None:
        self.text = (*self.text, *tokens)

    def allowed_mask(self, paths: Paths) -> torch.Tensor:
        return torch.from_numpy(np.stack([self._row(path) for path in paths]))

    def bitmask(self, paths: Paths) -> NDArray[np.uint8]:
        return np.packbits(self.allowed_mask(paths).numpy(), axis=-1, bitorder="little")

    def _row(self, path: Sequence[int]) -> NDArray[np.bool_]:
        dice = random.Random(str((*self.text, *path)))
        row = np.array([dice.random() < 0.33 for _ in range(self.vocab)])
        row[dice.randrange(min(self.vocab, 8))] = True
        return row


class OneHalf:
    """Allows the upper or the lower half of a vocabulary of 300 tokens."""

    def __init__(self, upper: bool) -> None:
        self._row = np.arange(300) >= 150 if upper else np.arange(300) < 150

    def observe(self, tokens: Sequence[int]) -> None:
        pass

    def allowed_mask(self, paths: Paths) -> torch.Tensor:
        return torch.from_numpy(np.stack([self._row] * len(paths)))

    def bitmask(self, paths: Paths) -> NDArray[np.uint8]:
        return np.packbits(self.allowed_mask(paths).numpy(), axis=-1, bitorder="little")
