"""What every forward takes. Letters: n rows of a forward, W the width of the mask window, S sequences in the cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of every forward: prompt chunk, plain decoding, tree growth, verification, particles.

    A row sees every slot of its sequence older than the last W ones, and of those the ones its mask row names; its own
    slot is among them. All tensors lie on the model's device.
    """

    tokens: Tensor  # [n] int64
    positions: Tensor  # [n] int64, RoPE positions in the row's own sequence
    slots: Tensor  # [n] int64, where the row's KV goes, counted from the start of its sequence's region
    mask: Tensor  # [n, W] bool, right-aligned: column W - 1 is slot kv_len[sequence] - 1
    sequence: Tensor  # [n] int64, which region of the cache
    kv_len: Tensor  # [S] int64, slots in use once this batch's own are written

    def __len__(self) -> int:
        return self.tokens.shape[0]


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A Batch before it is on the device: the same parts as numpy arrays."""

    tokens: Ints
    positions: Ints
    slots: Ints
    mask: NDArray[np.bool_]
    sequence: Ints
    kv_len: Ints

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def to(self, device: torch.device) -> Batch:
        """Its tensors on the device."""
        parts = (self.tokens, self.positions, self.slots, self.mask, self.sequence, self.kv_len)
        return Batch(*(torch.from_numpy(part).to(device) for part in parts))
