"""One model with its cache: the only thing that runs a forward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.distributed.groups.peers import PeerParallel
from swiftspec.model.batch import Batch
from swiftspec.model.config import ModelConfig
from swiftspec.model.group import Group
from swiftspec.model.stack import Fused
from swiftspec.runtime.graph import Capture, Graphs, HostBatch
from swiftspec.runtime.kv_cache import KVCache, Move
from swiftspec.runtime.native_tree import NativeTree
from swiftspec.sampling import sampler
from swiftspec.sampling.guidance import Guidance
from swiftspec.tree import mask as tree_mask

Ints = NDArray[np.int64]
T = TypeVar("T")

PREFILL_CHUNK = 256  # rows: large enough to be bound by compute, small enough to be interrupted


class Model(Protocol):
    """What a runner needs of a transformer."""

    config: ModelConfig
    kv_heads: int  # of this rank
    group: Group | None
    fused: Fused | None
    dtype: torch.dtype
    device: torch.device

    def forward(self, batch: Batch, cache: KVCache, *, head: bool = True) -> Tensor | None: ...


class Ops(sampler.Ops, Protocol):
    """What a round needs of the module of operators that the model was built with."""

    def mover(self, k: Tensor, v: Tensor, /) -> Move: ...


class Runner:
    """Runs one model over a prefix and a tree, and keeps its books: slots, forwards, busy time.

    A guided request has two sequences, the conditional and the unconditional one, each with its own prefix and
    positions, under one tree: every row runs in both, in one batch, and what comes out are the guided logits.
    """

    def __init__(
        self, model: Model, ops: Ops, *, context: int, tree_slots: int, capture: Capture | None = None
    ) -> None:
        """`capture`: forwards that give logits are captured with it; None: they are not."""
        config = model.config
        self.ops = ops
        self.tree_slots = tree_slots
        self.cache = KVCache(
            config.num_layers,
            model.kv_heads,
            config.head_dim,
            context + tree_slots,
            ops.mover,
            dtype=model.dtype,
            device=model.device,
        )
        self.busy = 0.0  # seconds spent in forwards, and in draws that are one graph with them
        self.capture = capture
        self._guidance: Guidance | None = None
        self.use(model)

    def use(self, model: Model) -> None:
        """Takes this model, or another that stands for the same one, from now on."""
        self.model = model
        self._settle()

    def _settle(self) -> None:
        """Binds to the cache's buffers what knows their addresses. Guided rows go neither way: their logits are two."""
        fused, alone = self.model.fused, len(self.cache.prefix_len) == 1
        self.rounds = fused.rounds(self.cache) if fused is not None and alone else None
        self.graphs = Graphs(self._logits, self.model.device, self.capture) if self.capture and alone else None

    def open(self, tokens: Sequence[int], guidance: Guidance | None = None) -> None:
        """Starts over from a text whose last token is the root. What stands before it, and before the root of the
        unconditional text, becomes the prefixes."""
        texts = [tokens] if guidance is None else [tokens, guidance.tokens]
        before = self.cache.k
        self.cache.reset(len(texts))
        if self.cache.k is not before:
            self._settle()
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

    def tree_step(self, step: Callable[[HostBatch], T], tokens: Ints, depths: Ints, mask: tree_mask.Rows) -> T:
        """As `forward_tree`, with `step` in place of the forward."""
        starts = dict(enumerate(self.cache.prefix_len))
        batch = self._batch(tokens, depths, starts, self.cache.append_tree(tokens.shape[0]), mask)
        with self._busy():
            return step(batch)

    def expand(
        self, tree: NativeTree, pending: list[int], w: int, k: int, scoring: Any, coupled: bool, tau: float
    ) -> None:
        """One expansion in one call: leaves, forward, children. `pending` as in `forward_chain`; `scoring` is what
        `rounds` made; `coupled` and `tau` as in `Sampler.children`."""
        assert self.rounds is not None
        prefix = self.cache.prefix_len[0]
        count, seconds = self.rounds.expand(tree.native, prefix, pending, w, k, scoring, coupled, tau)
        if pending:
            self.cache.append_prefix(len(pending))
        self.cache.append_tree(count)
        self.busy += seconds

    def verify(self, tokens: Sequence[int], parents: Sequence[int], scoring: Any) -> tuple[list[int], list[int]]:
        """One verification in one call: the accepted path of these nodes, which then is part of the prefix, and the
        tokens drawn along it."""
        assert self.rounds is not None
        path, sampled, seconds = self.rounds.verify(tokens, parents, self.cache.prefix_len[0], scoring)
        self.cache.append_prefix(len(path))
        self.busy += seconds
        return path, sampled

    def _forward(
        self, tokens: Ints, places: Ints | None, starts: dict[int, int], first: int, mask: tree_mask.Rows, *,
        head: bool = True,
    ) -> Tensor | None:  # fmt: skip
        """One forward over a `_batch`. Returns the logits, guided if there are two sequences."""
        batch = self._batch(tokens, places, starts, first, mask)
        with self._busy():
            logits = self._run(batch, head)
        if logits is None or len(starts) == 1:
            return logits
        assert self._guidance is not None and logits.shape[0] == 2 * tokens.shape[0]
        return self._guidance.combine(logits)

    def _batch(
        self, tokens: Ints, places: Ints | None, starts: dict[int, int], first: int, mask: tree_mask.Rows
    ) -> HostBatch:
        """The same rows in some sequences, all counted from a slot `starts` of each: row i has slot `first` + i and
        position `places[i]`, without these the slot's."""
        several = len(starts) > 1
        rows = [self._rows(sequence, start, tokens, places, first) for sequence, start in starts.items()]
        token, position, slot, sequence = map(np.concatenate, zip(*rows, strict=True)) if several else rows[0]
        mask = tree_mask.pad_left(mask)
        return HostBatch(
            tokens=token,
            positions=position,
            slots=slot,
            mask=np.tile(mask, (len(rows), 1)) if several else mask,
            sequence=sequence,
            kv_len=np.array(self.cache.kv_len()),
        )

    @contextmanager
    def _busy(self) -> Iterator[None]:
        began = time.perf_counter()
        with self.naming_lost():
            yield
        self.busy += time.perf_counter() - began

    @contextmanager
    def naming_lost(self) -> Iterator[None]:
        """Raises RankLost where a peer that did not come is why the device reports an error."""
        try:
            yield
        except RuntimeError:
            group = self.model.group
            if isinstance(group, PeerParallel) and (lost := group.lost()) is not None:
                raise lost from None
            raise

    def _run(self, batch: HostBatch, head: bool) -> Tensor | None:
        device = self.model.device
        if head and self.graphs is not None and self.graphs.take(batch.tokens.shape[0]):
            logits = self.graphs(batch)
        else:
            logits = self.model.forward(batch.to(device), self.cache, head=head)
        if device.type == "cuda":
            # the result is read at once; without this the time would be the launch's, and inputs would be overwritten
            torch.cuda.current_stream(device).synchronize()
        return logits

    def _rows(
        self, sequence: int, start: int, tokens: Ints, places: Ints | None, first: int
    ) -> tuple[Ints, Ints, Ints, Ints]:
        """Tokens, positions, slots and sequence of one sequence's rows, [n] each."""
        count = tokens.shape[0]
        slots = np.arange(start + first, start + first + count)
        positions = slots if places is None else places + start
        if sequence == 1 and self._guidance is not None:  # the two texts may differ in their root at the start
            text = self._guidance.tokens
            tokens = np.where(positions == len(text) - 1, text[-1], tokens)
        return tokens, positions, slots, np.full(count, sequence)

    def _logits(self, batch: Batch) -> Tensor:
        logits = self.model.forward(batch, self.cache)
        assert logits is not None
        return logits

    def reset(self) -> None:
        """Forgets the request."""
        before = self.cache.k
        self.cache.reset()
        self._guidance = None
        if self.cache.k is not before:
            self._settle()
