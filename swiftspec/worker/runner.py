"""One model with its cache: the only thing that runs a forward."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from swiftspec.batch import Batch
from swiftspec.config import ModelConfig
from swiftspec.spec import mask as tree_mask
from swiftspec.spec.kv_cache import KVCache, MoveKV

PREFILL_CHUNK = 256  # rows: large enough to be bound by compute, small enough to be interrupted


class Model(Protocol):
    """What a runner needs of a transformer."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    def forward(self, batch: Batch, cache: KVCache, *, head: bool = True) -> Tensor | None: ...


class Runner:
    """Runs one model over one sequence's prefix and tree, and keeps its books: slots, forwards, busy time."""

    def __init__(self, model: Model, move_kv: MoveKV, *, context: int, tree_slots: int) -> None:
        config = model.config
        self.model = model
        self.context = context
        self.tree_slots = tree_slots
        self.cache = KVCache(
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            context + tree_slots,
            move_kv,
            dtype=model.dtype,
            device=model.device,
        )
        self.busy = 0.0  # seconds spent in forwards
        self._sequence = torch.zeros(max(PREFILL_CHUNK, tree_slots), dtype=torch.int64, device=model.device)

    def prefill(self, tokens: Sequence[int]) -> None:
        """Appends `tokens` to the prefix, whose tree must be empty, in chunks and without logits."""
        for start in range(0, len(tokens), PREFILL_CHUNK):
            chunk = tokens[start : start + PREFILL_CHUNK]
            first = self.cache.append_prefix(len(chunk))
            slots = torch.arange(first, first + len(chunk), device=self.model.device)
            self._run(torch.tensor(chunk), slots, slots, tree_mask.causal(len(chunk)), head=False)

    def forward_chain(self, tokens: Sequence[int], positions: Tensor | None = None) -> Tensor:
        """Runs the last pending tokens and an unexpanded root: all but the last row join the prefix, the last becomes
        tree slot 0. Returns the root's logits [1, vocab]."""
        first = self.cache.append_prefix(len(tokens) - 1) if len(tokens) > 1 else self.cache.prefix_len[0]
        self.cache.append_tree(1)
        slots = torch.arange(first, first + len(tokens), device=self.model.device)
        logits = self._run(torch.tensor(list(tokens)), slots, slots, tree_mask.causal(len(tokens)))
        return logits[-1:]

    def forward_tree(self, tokens: Tensor, depths: Tensor, mask: Tensor) -> Tensor:
        """Appends rows to the tree: `tokens` and `depths` [n], `mask` [n, tree slots in use after it]. Logits [n, vocab]."""
        start = self.cache.prefix_len[0]
        first = start + self.cache.append_tree(tokens.shape[0])
        slots = torch.arange(first, first + tokens.shape[0], device=self.model.device)
        return self._run(tokens, depths + start, slots, mask)

    def _run(self, tokens: Tensor, positions: Tensor, slots: Tensor, mask: Tensor, *, head: bool = True) -> Tensor:
        device = self.model.device
        batch = Batch(
            tokens=tokens.to(device),
            positions=positions,
            slots=slots,
            mask=tree_mask.pad_left(mask.to(device)),
            sequence=self._sequence[: tokens.shape[0]],
            kv_len=torch.tensor(self.cache.kv_len(), device=device),
        )
        began = time.perf_counter()
        logits = self.model.forward(batch, self.cache, head=head)
        self.busy += time.perf_counter() - began
        return logits if logits is not None else tokens.new_empty(0)

    def reset(self) -> None:
        """Forgets the request."""
        self.cache.truncate(0)
