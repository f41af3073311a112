"""Noise for graphs: a block of it in tensors that stay where they are."""

from __future__ import annotations

import torch
from torch import Tensor

from swiftspec.sampling.noise import PositionNoise


class StaticNoiseBuffer:
    """A block of noise in tensors that stay where they are: a graph reads of them what they hold when it is replayed.
    Columns are all tokens of the vocabulary."""

    def __init__(self, vocab: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self._block = torch.zeros(PositionNoise.BLOCK_POSITIONS, vocab, dtype=dtype, device=device)
        self._first = torch.zeros(1, dtype=torch.int64, device=device)
        self._holds: tuple[PositionNoise, range] | None = None  # whose noise, of which positions

    def ensure(self, noise: PositionNoise, low: int, end: int) -> None:
        """Sees to the noise of the positions from `low` to before `end`, at most a block of them."""
        if self._holds is not None and self._holds[0] is noise:
            held = self._holds[1]
            if held.start <= low and end <= held.stop:
                return
        span = range(low, low + len(self._block))
        assert end <= span.stop
        self._block.copy_(noise.generate(span, range(self._block.shape[1]), self._block.dtype))
        self._first.fill_(low)
        self._holds = noise, span

    def rows(self, positions: Tensor, tokens: range, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As `PositionNoise.rows`, without a look at the device; positions that are not held have any noise."""
        assert dtype == self._block.dtype
        rows = (positions - self._first).clamp_(0, len(self._block) - 1)
        return self._block[:, tokens.start : tokens.stop], rows
