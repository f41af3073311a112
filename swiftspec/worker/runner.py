"""One model with its cache: the only thing that runs a forward."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.batch import Batch
from swiftspec.config import ModelConfig
from swiftspec.model.parallel import Group
from swiftspec.ops.fused import Fused
from swiftspec.spec import mask as tree_mask
from swiftspec.spec import sampler
from swiftspec.spec.kv_cache import KVCache
from swiftspec.spec.native_tree import NativeTree
from swiftspec.worker.graph import Capture, Graphs, HostBatch

Ints = NDArray[np.int64]

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

    def move_kv(self, k: Tensor, v: Tensor, sequence: int, source: Tensor, start: int, /) -> None: ...


class Runner:
    """Runs one model over one sequence's prefix and tree, and keeps its books: slots, forwards, busy time."""

    def __init__(
        self, model: Model, ops: Ops, *, context: int, tree_slots: int, capture: Capture | None = None
    ) -> None:
        """`capture`: forwards that give logits are captured with it; None: they are not."""
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
        self.rounds = None if model.fused is None else model.fused.rounds(self.cache)
        self.busy = 0.0  # seconds spent in forwards
        self._graphs = None if capture is None else Graphs(self._logits, model.device, capture)

    def prefill(self, tokens: Sequence[int]) -> None:
        """Appends `tokens` to the prefix, whose tree must be empty, in chunks and without logits."""
        for start in range(0, len(tokens), PREFILL_CHUNK):
            chunk = np.array(tokens[start : start + PREFILL_CHUNK])
            first = self.cache.append_prefix(len(chunk))
            self._forward(chunk, None, first, tree_mask.causal(len(chunk)), head=False)

    def forward_chain(self, tokens: Sequence[int]) -> Tensor:
        """Runs verified tokens without KV and the root after them: the root becomes tree slot 0, the others join the
        prefix. Returns the root's logits [1, vocab]."""
        first = self.cache.append_prefix(len(tokens) - 1)
        self.cache.append_tree(1)
        logits = self._forward(np.array(tokens), None, first, tree_mask.causal(len(tokens)))
        assert logits is not None
        return logits[-1:]

    def forward_tree(self, tokens: Ints, depths: Ints, mask: tree_mask.Rows) -> Tensor:
        """Appends rows to the tree: `tokens` and `depths` [n], `mask` [n, tree slots in use after it]. Returns logits
        [n, vocab]."""
        start = self.cache.prefix_len[0]
        first = start + self.cache.append_tree(tokens.shape[0])
        logits = self._forward(tokens, depths + start, first, mask)
        assert logits is not None
        return logits

    def expand(self, tree: NativeTree, pending: list[int], w: int, k: int, scoring: Any, tau: float | None) -> None:
        """One expansion in one call: leaves, forward, children. `pending` as in `forward_chain`; `scoring` is what
        `rounds` made."""
        assert self.rounds is not None
        prefix = self.cache.prefix_len[0]
        count, seconds = self.rounds.expand(tree.native, prefix, pending, w, k, scoring, tau)
        if pending:
            self.cache.append_prefix(len(pending))
        self.cache.append_tree(count)
        self.busy += seconds

    def verify(self, tokens: Sequence[int], parents: Sequence[int], scoring: Any) -> tuple[list[int], list[int]]:
        """One verification in one call: the accepted path of these nodes, and the tokens drawn along it."""
        assert self.rounds is not None and self.cache.tree_len == 0
        path, sampled, seconds = self.rounds.verify(tokens, parents, self.cache.prefix_len[0], scoring)
        self.cache.append_tree(len(tokens))
        self.busy += seconds
        return path, sampled

    def _forward(
        self, tokens: Ints, positions: Ints | None, first: int, mask: tree_mask.Rows, *, head: bool = True
    ) -> Tensor | None:
        """One forward over rows in slots `first` and on; without `positions` [n] each row stands at its slot."""
        slots = np.arange(first, first + tokens.shape[0])
        batch = HostBatch(
            tokens=tokens,
            positions=slots if positions is None else positions,
            slots=slots,
            mask=tree_mask.pad_left(mask),
            kv_len=np.array(self.cache.kv_len()),
        )
        began = time.perf_counter()
        if head and self._graphs is not None and self._graphs.take(tokens.shape[0]):
            logits = self._graphs(batch)
        else:
            logits = self.model.forward(batch.to(self.model.device), self.cache, head=head)
        if self.model.device.type == "cuda":
            # the result is read at once; without this the time would be the launch's, and inputs would be overwritten
            torch.cuda.synchronize(self.model.device)
        self.busy += time.perf_counter() - began
        return logits

    def _logits(self, batch: Batch) -> Tensor:
        logits = self.model.forward(batch, self.cache)
        assert logits is not None
        return logits

    def reset(self) -> None:
        """Forgets the request."""
        self.cache.truncate(0)
