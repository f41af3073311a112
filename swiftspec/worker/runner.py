"""One model with its cache: the only thing that runs a forward."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.batch import Batch
from swiftspec.config import ModelConfig
from swiftspec.model.parallel import Group
from swiftspec.spec import mask as tree_mask
from swiftspec.spec import sampler
from swiftspec.spec.guidance import Guidance
from swiftspec.spec.kv_cache import KVCache

Ints = NDArray[np.int64]

PREFILL_CHUNK = 256  # rows: large enough to be bound by compute, small enough to be interrupted


class Model(Protocol):
    """What a runner needs of a transformer."""

    config: ModelConfig
    kv_heads: int  # of this rank
    group: Group | None
    dtype: torch.dtype
    device: torch.device

    def forward(self, batch: Batch, cache: KVCache, *, head: bool = True) -> Tensor | None: ...


class Ops(sampler.Ops, Protocol):
    """What a round needs of the module of operators that the model was built with."""

    def move_kv(self, k: Tensor, v: Tensor, sequence: int, source: Tensor, start: int, /) -> None: ...


class Runner:
    """Runs one model over a prefix and a tree, and keeps its books: slots, forwards, busy time.

    A guided request has two sequences, the conditional and the unconditional one, each with its own prefix and
    positions, under one tree: every row runs in both, in one batch, and what comes out are the guided logits.
    """

    def __init__(self, model: Model, ops: Ops, *, context: int, tree_slots: int) -> None:
        config = model.config
        self.model = model
        self.ops = ops
        self.tree_slots = tree_slots
        self.cache = KVCache(
            config.num_layers,
            model.kv_heads,
            config.head_dim,
            context + tree_slots,
            ops.move_kv,
            dtype=model.dtype,
            device=model.device,
        )
        self.busy = 0.0  # seconds spent in forwards
        rows = max(PREFILL_CHUNK, tree_slots)
        self._sequences = [torch.full((rows,), sequence, device=model.device) for sequence in range(2)]
        self._counting = torch.arange(self.cache.capacity, device=model.device)
        self._guidance: Guidance | None = None

    def open(self, tokens: Sequence[int], guidance: Guidance | None = None) -> None:
        """Starts over from a text whose last token is the root. What stands before it, and before the root of the
        unconditional text, becomes the prefixes."""
        texts = [tokens] if guidance is None else [tokens, guidance.tokens]
        self.cache.reset(len(texts))
        self._guidance = guidance
        for sequence, text in enumerate(texts):
            self._append(text[:-1], sequence)

    def prefill(self, tokens: Sequence[int]) -> None:
        """Appends `tokens` to the prefix, whose tree must be empty, in chunks and without logits."""
        for sequence in range(len(self.cache.prefix_len)):
            self._append(tokens, sequence)

    def _append(self, tokens: Sequence[int], sequence: int) -> None:
        for start in range(0, len(tokens), PREFILL_CHUNK):
            chunk = np.array(tokens[start : start + PREFILL_CHUNK])
            first = self.cache.append_prefix(len(chunk), sequence)
            self._forward(chunk, None, {sequence: first}, 0, tree_mask.causal(len(chunk)), head=False)

    def forward_chain(self, tokens: Sequence[int]) -> Tensor:
        """Runs verified tokens without KV and the root after them: the root becomes tree slot 0, the others join the
        prefix. Returns the root's logits [1, vocab]."""
        starts = {s: self.cache.append_prefix(len(tokens) - 1, s) for s in range(len(self.cache.prefix_len))}
        self.cache.append_tree(1)
        logits = self._forward(np.array(tokens), None, starts, 0, tree_mask.causal(len(tokens)))
        assert logits is not None
        return logits[-1:]

    def forward_tree(self, tokens: Ints, depths: Ints, mask: tree_mask.Rows) -> Tensor:
        """Appends rows to the tree: `tokens` and `depths` [n], `mask` [n, tree slots in use after it]. Returns logits
        [n, vocab]."""
        starts = dict(enumerate(self.cache.prefix_len))
        logits = self._forward(tokens, depths, starts, self.cache.append_tree(tokens.shape[0]), mask)
        assert logits is not None
        return logits

    def _forward(
        self, tokens: Ints, places: Ints | None, starts: dict[int, int], first: int, mask: tree_mask.Rows, *,
        head: bool = True,
    ) -> Tensor | None:  # fmt: skip
        """One forward over the same rows in some sequences, all counted from a slot `starts` of each: row i has slot
        `first` + i and position `places[i]`, without these the slot's. Returns the logits, guided if there are two."""
        device, count = self.model.device, tokens.shape[0]
        rows = [self._rows(sequence, start, tokens, places, first) for sequence, start in starts.items()]
        mask = tree_mask.pad_left(mask)
        if len(rows) > 1:
            mask = np.tile(mask, (len(rows), 1))
        token, position, slot, sequence = rows[0] if len(rows) == 1 else map(torch.cat, zip(*rows, strict=True))
        batch = Batch(
            tokens=token,
            positions=position,
            slots=slot,
            mask=torch.from_numpy(mask).to(device),
            sequence=sequence,
            kv_len=torch.from_numpy(np.array(self.cache.kv_len())).to(device),
        )
        began = time.perf_counter()
        logits = self.model.forward(batch, self.cache, head=head)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the result is read at once; without this the time would be the launch's
        self.busy += time.perf_counter() - began
        if logits is None or len(rows) == 1:
            return logits
        assert self._guidance is not None and logits.shape[0] == 2 * count
        return self._guidance.combine(logits)

    def _rows(
        self, sequence: int, start: int, tokens: Ints, places: Ints | None, first: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens, positions, slots and sequence of one sequence's rows, [n] each."""
        device, count = self.model.device, tokens.shape[0]
        slots = self._counting[start + first : start + first + count]
        positions = slots if places is None else torch.from_numpy(places + start).to(device)
        token = torch.from_numpy(tokens).to(device)
        if sequence == 1 and self._guidance is not None:  # the two texts may differ in their root at the start
            text = self._guidance.tokens
            token = token.where(positions != len(text) - 1, text[-1])
        return token, positions, slots, self._sequences[sequence][:count]

    def reset(self) -> None:
        """Forgets the request."""
        self.cache.reset()
        self._guidance = None
