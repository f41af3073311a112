"""Input of a forward. Letters: n rows of a forward, W the width of the mask window, S sequences in the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of every forward: prefill chunk, autoregressive decoding, expansion, verification, particles.

    A row attends to all slots of its sequence before the last W ones, and among those to the ones in its mask row,
    which include its own slot. All tensors are on the model's device.
    """

    tokens: Tensor  # [n] int64
    positions: Tensor  # [n] int64, RoPE positions in the row's own sequence
    slots: Tensor  # [n] int64, slot of the row's KV, relative to the region of its sequence
    mask: Tensor  # [n, W] bool, right-aligned: column W - 1 is slot kv_len[sequence] - 1
    sequence: Tensor  # [n] int64, index of the row's region in the cache
    kv_len: Tensor  # [S] int64, slots in use, including those that this batch writes

    def __len__(self) -> int:
        return self.tokens.shape[0]


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A `Batch` in host memory: the same fields as NumPy arrays."""

    tokens: Ints
    positions: Ints
    slots: Ints
    mask: NDArray[np.bool_]
    sequence: Ints
    kv_len: Ints

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def to(self, device: torch.device) -> Batch:
        """Copies the batch to the device."""
        parts = (self.tokens, self.positions, self.slots, self.mask, self.sequence, self.kv_len)
        return Batch(*(torch.from_numpy(part).to(device) for part in parts))
