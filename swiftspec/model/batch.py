"""Input of a forward, `Batch` on the model's device or `HostBatch` in host memory, and its `ForwardOutput`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


class Chain(NamedTuple):
    """Describes a batch whose rows are consecutive tokens of one sequence, in its last slots, such as a prefill chunk:
    a row attends to all slots up to its own."""

    sequence: int
    kv_len: int  # slots in use of this sequence, including those of the batch


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of every forward: prefill chunk, autoregressive decoding, expansion, verification, particles.

    Each row is one token of one sequence. `mask` covers the last `window` slots in use of the row's sequence; the row
    attends to the slots that are set there and to all earlier slots. A row's own slot lies in the window and is set.
    All tensors are on the model's device.
    """

    tokens: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64, RoPE position of the row in its sequence
    slots: Tensor  # [rows] int64, slot that the row's KV is written to, counted from the first slot of its sequence
    mask: Tensor  # [rows, window] bool, right-aligned: the last column is slot kv_len[sequence] - 1
    sequence: Tensor  # [rows] int64, index of the row's sequence in the cache
    kv_len: Tensor  # [sequences] int64, slots in use, including those that this batch writes
    # on the host: no element of `kv_len` is larger, so that operators need not read it; None: unknown
    max_kv_len: int | None = None
    chain: Chain | None = None  # on the host; None: not a chain, or unknown
    hidden: Tensor | None = None  # [rows, hidden], inputs of a draft head besides the tokens (model/draft_head.py)
    # of the block of a block head: number of rows after the first that have logits; None: all rows have them
    num_logits: int | None = None
    blocks: int = 1  # of equal length, one for each sequence of a guided request

    def __len__(self) -> int:
        return self.tokens.shape[0]


class ForwardOutput(NamedTuple):
    """The output of a forward, on the model's device.

    Hidden states are the residual stream after a layer, which the next layer or the final norm reads, in the dtype of
    the residual stream. In a group every rank has all of them.
    """

    logits: Tensor | None  # [rows, vocab], in a group of this rank's part of the vocabulary; None: no LM head was run
    hidden: Tensor | None  # [rows, hidden layers, hidden size]; None if the model keeps no hidden states


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A `Batch` in host memory: the same fields, its tensors as NumPy arrays, except `hidden`, which is on the model's
    device."""

    tokens: Ints
    positions: Ints
    slots: Ints
    mask: NDArray[np.bool_]
    sequence: Ints
    kv_len: Ints
    chain: Chain | None = None
    hidden: Tensor | None = None
    num_logits: int | None = None
    blocks: int = 1

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def rows_per_block(self) -> int:
        """Number of rows of each block."""
        return len(self) // self.blocks

    @property
    def max_kv_len(self) -> int:
        """The largest element of `kv_len`."""
        return int(self.kv_len.max())

    def to(self, device: torch.device) -> Batch:
        """Copies the batch to the device."""
        parts = (self.tokens, self.positions, self.slots, self.mask, self.sequence, self.kv_len)
        on_device = (torch.from_numpy(part).to(device) for part in parts)
        return Batch(
            *on_device,
            max_kv_len=self.max_kv_len,
            chain=self.chain,
            hidden=self.hidden,
            num_logits=self.num_logits,
            blocks=self.blocks,
        )


def merge_batches(batches: Sequence[HostBatch]) -> HostBatch:
    """Returns one batch with the rows of several, which have no sequence in common: the rows of the first batch, then
    those of the next one, all in one block, with logits for every row. Either all batches have `hidden` or none. The
    `kv_len` of each batch is 0 for sequences that it does not have."""
    if len(batches) == 1:
        return batches[0] if batches[0].blocks == 1 else replace(batches[0], blocks=1)
    fields = "tokens", "positions", "slots", "sequence"
    tokens, positions, slots, sequence = (np.concatenate([getattr(b, name) for b in batches]) for name in fields)
    width = max(batch.mask.shape[1] for batch in batches)
    # what precedes a mask is visible
    masks = [np.pad(b.mask, ((0, 0), (width - b.mask.shape[1], 0)), constant_values=True) for b in batches]
    kv_len = np.max([batch.kv_len for batch in batches], axis=0)
    states = [batch.hidden for batch in batches if batch.hidden is not None]
    hidden = torch.cat(states) if states else None
    return HostBatch(tokens, positions, slots, np.concatenate(masks), sequence, kv_len, hidden=hidden)
