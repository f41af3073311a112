"""Position-keyed noise: a function of seed, stream, position and token only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from swiftspec.backends.reference import reference
from swiftspec.backends.reference.noise import gumbel, noise_bits

TARGET_STREAM = 0
DRAFT_STREAM = 1  # sampled children of the draft
COIN_STREAM = 2  # acceptance of sampled children
RESIDUAL_STREAM = 3  # the token after the accepted path, with rejection sampling
ACCEPTANCE_STREAM = 4  # number of accepted nodes, with synthetic acceptance
GumbelRows = Callable[[int, int, Tensor, range], Tensor]  # seed, stream, positions [p], tokens -> [p, tokens] float32


class PositionNoise:
    """Gumbel noise of one stream by position. It is generated and cached in blocks of positions, since the nodes of a
    tree share few positions, and consecutive rounds use neighbouring ones."""

    BLOCK_POSITIONS = 32

    def __init__(
        self,
        seed: int,
        device: torch.device | str,
        *,
        stream: int = TARGET_STREAM,
        gumbel_rows: GumbelRows = reference.gumbel_rows,
    ) -> None:
        self._seed, self._stream, self._device = seed, stream, device
        self._gumbel_rows = gumbel_rows
        self._tokens = range(0)
        self._first = 0
        self._block = torch.empty(0)

    def rows(self, positions: Tensor, tokens: range, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns a block of noise [positions of the block, len(tokens)], and for each of `positions` [n] its row in
        the block, on the device. `tokens`: token ids of the columns; the noise of a token does not depend on the range.
        Synchronises with the device of `positions`."""
        low, high = (int(bound) for bound in positions.aminmax())
        end = self._first + self._block.shape[0]
        if not (self._first <= low and high < end) or self._block.dtype != dtype or self._tokens != tokens:
            self._first, self._tokens = low, tokens
            self._block = self.generate(range(low, max(high + 1, low + self.BLOCK_POSITIONS)), tokens, dtype)
        return self._block, (positions - self._first).to(self._block.device, non_blocking=True)

    def generate(self, span: range, tokens: range, dtype: torch.dtype) -> Tensor:
        """Generates the noise [len(span), len(tokens)] of the positions `span`."""
        if dtype == torch.float32:
            positions = torch.arange(span.start, span.stop, device=self._device)
            return self._gumbel_rows(self._seed, self._stream, positions, tokens)
        return gumbel(noise_bits(self._seed, self._stream, span, tokens, self._device), dtype)
