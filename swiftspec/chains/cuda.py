"""Chains of draft tokens against the target on a GPU, in one launch (csrc/cuda/chains; smc/chain_verification.py has
the law)."""

from __future__ import annotations

import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cuda.checks import current_stream

MARK_WORDS = 4  # of a position


class ChainVerifier:
    """`greedy`, `match` and `reject` of smc/chain_verification.py for B requests of K draft tokens each, over V tokens.

    Logits are shaped already, float32 or bfloat16, and read where they are: rows may be padded, neighbours in a row
    must be neighbours in memory. Noise is not given but made, of `keys` [B, K + 1] int32: a row key
    (`ops.noise.row_keys`) for each position, so that nothing of the size of a vocabulary is written. All return
    accepted [B, K] bool, how many [B] int64, and the target's token after them [B] int64. Calls of one object are made
    on one stream.
    """

    def __init__(self, batch: int, steps: int, device: torch.device | str) -> None:
        self.batch, self.steps = batch, steps
        self._marks = torch.empty(batch * (steps + 1) * MARK_WORDS, dtype=torch.int32, device=device)
        self._arrived = torch.zeros(batch, dtype=torch.int32, device=device)

    def greedy(self, target: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`target` [B, K + 1, V]; `tokens` [B, K] int64, within the vocabulary, as everywhere here."""
        return self._launch(target, tokens, None, None, None)

    def match(self, target: Tensor, tokens: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The noise of position k, by keys[:, k], draws the target's token there."""
        return self._launch(target, tokens, keys, None, None)

    def reject(
        self, target: Tensor, draft: Tensor, tokens: Tensor, coins: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`draft` [B, K, V], of the target's type; `coins` [B, K] float32 in (0, 1). What follows n tokens that stay is
        drawn by the noise of keys[:, n]. Arithmetic in float32."""
        return self._launch(target, tokens, keys, draft, coins)

    def _launch(
        self, target: Tensor, tokens: Tensor, keys: Tensor | None, draft: Tensor | None, coins: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, steps, device = self.batch, self.steps, self._marks.device
        accepted = torch.empty(batch, steps, dtype=torch.bool, device=device)
        count, bonus = (torch.empty(batch, dtype=torch.int64, device=device) for _ in range(2))
        _C.verify_cuda(
            target=target,
            draft=draft,
            tokens=tokens,
            coins=coins,
            keys=keys,
            marks=self._marks,
            arrived=self._arrived,
            accepted=accepted,
            count=count,
            bonus=bonus,
            stream=current_stream(),
        )
        return accepted, count, bonus
