"""Delta cache: recurrent states of the delta layers of a model, and what its latest slots add to them.

A delta layer computes S_t = e^g S_(t-1) + k u', with the key k, the decay g <= 0 and the update u of position t. The
cache holds the folded state, S after the first `folded` positions of a sequence, and k, u, g and the convolution's
input of every later slot, of the prefix as of the tree. The state of a node is the folded state plus what its
ancestors' slots add, so a tree needs no copies of states, and a commit recomputes nothing.

A row at position p reads the state of the positions before `fold_point(p)` and its ancestors' slots from there on. The
fold point depends on the position alone, so the terms of a row's sums are the same wherever rounds and prefill chunks
end. It lies 32 to 63 positions before p: a tree that is at most 32 levels deep has its fold points in the prefix, and
the slots from the fold point on contain the window of the convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

FOLD_POSITIONS = 32  # positions that are folded together
MAX_UNFOLDED_POSITIONS = 2 * FOLD_POSITIONS - 1  # verified positions that are not folded, after `settle`


class DeltaCacheOps(Protocol):
    """The operators of a delta cache; swiftspec.backends.reference documents them."""

    def fold_state(self, state: Tensor, keys: Tensor, updates: Tensor, decays: Tensor, /) -> None: ...
    def move_slots(self, buffer: Tensor, sequence: int, slots: Sequence[int], first: int, /) -> None: ...


def fold_point(position: int) -> int:
    """Returns the number of positions whose state a row at `position` reads in folded form."""
    return max(position // FOLD_POSITIONS - 1, 0) * FOLD_POSITIONS


@dataclass(frozen=True, slots=True)
class _SavedPrefix:
    """The states of a sequence's first slots."""

    folded: int
    tensors: list[Tensor]


class DeltaCache:
    """A `LayerCache` of delta layers.

    `state` is [layers, sequences, v_heads, k_head_dim, v_head_dim]. Index i of the slots of `keys` [layers, sequences,
    slots, k_heads, k_head_dim], `updates` [layers, sequences, slots, v_heads, v_head_dim], `decays` [layers, sequences,
    slots, v_heads] and `inputs` [layers, sequences, slots, conv_size] is slot `folded[sequence] + i` of the model
    cache.
    """

    def __init__(
        self, layers: int, k_heads: int, v_heads: int, k_head_dim: int, v_head_dim: int, conv_size: int,
        conv_width: int, slots: int, ops: DeltaCacheOps, *, dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        """`conv_size`: channels of the convolution. `conv_width`: positions that it reads. `slots`: largest number of
        slots of a sequence that are in use and not folded. `dtype`: that of the model, for `inputs`; the other buffers
        are float32, or float64 in a float64 model."""
        self.conv_width, self._layers, self._slots, self._ops = conv_width, layers, slots, ops
        # of a sequence, or of a slot
        self._shapes = (v_heads, k_head_dim, v_head_dim), (k_heads, k_head_dim), (v_heads, v_head_dim), (v_heads,)
        self._conv_size = conv_size
        self._dtype, self._device = dtype, device
        self.folded = np.zeros(0, np.int64)  # [sequences], read by native code
        self.state = self.keys = self.updates = self.decays = self.inputs = torch.empty(0)

    def allocate(self, sequences: int) -> None:
        self.state = self.keys = self.updates = self.decays = self.inputs = torch.empty(0)  # frees the old buffers
        wide, size = torch.promote_types(self._dtype, torch.float32), (self._layers, sequences)
        state, *by_slot = self._shapes
        self.state = torch.zeros(*size, *state, dtype=wide, device=self._device)
        self.keys, self.updates, self.decays = (
            torch.zeros(*size, self._slots, *shape, dtype=wide, device=self._device) for shape in by_slot
        )
        self.inputs = torch.zeros(*size, self._slots, self._conv_size, dtype=self._dtype, device=self._device)
        self.folded = np.zeros(sequences, np.int64)

    def _slot_buffers(self) -> tuple[Tensor, ...]:
        return self.keys, self.updates, self.decays, self.inputs

    def move(self, sequence: int, slots: Sequence[int], first: int) -> None:
        folded = int(self.folded[sequence])
        source = [slot - folded for slot in slots]
        for buffer in self._slot_buffers():
            self._ops.move_slots(buffer, sequence, source, first - folded)

    def settle(self, sequence: int, verified: int, used: int) -> None:
        """Folds what rows at position `verified` and later read in folded form."""
        folded = int(self.folded[sequence])
        count = fold_point(verified) - folded
        if count <= 0:
            return
        for layer, state in enumerate(self.state[:, sequence]):
            keys, updates, decays, _ = (buffer[layer, sequence] for buffer in self._slot_buffers())
            for first in range(0, count, FOLD_POSITIONS):
                part = slice(first, first + FOLD_POSITIONS)
                self._ops.fold_state(state, keys[part], updates[part], decays[part])
        for buffer in self._slot_buffers():
            self._ops.move_slots(buffer, sequence, range(count, used - folded), 0)
        self.folded[sequence] += count

    def reusable(self, sequence: int, count: int) -> bool:
        return bool(self.folded[sequence] <= fold_point(count))

    def clear(self, sequence: int) -> None:
        self.folded[sequence] = 0
        self.state[:, sequence].zero_()

    def copy_prefix(self, source: int, destination: int, count: int) -> None:
        self.load_prefix(destination, self.save_prefix(source, count), count)

    def save_prefix(self, sequence: int, count: int) -> _SavedPrefix:
        """Returns copies of the folded state and of the later slots."""
        assert self.reusable(sequence, count)
        left = count - int(self.folded[sequence])
        kept = [buffer[:, sequence, :left].clone() for buffer in self._slot_buffers()]
        return _SavedPrefix(int(self.folded[sequence]), [self.state[:, sequence].clone(), *kept])

    def load_prefix(self, sequence: int, saved: _SavedPrefix, count: int) -> None:
        assert saved.folded <= fold_point(count)
        left, (state, *kept) = count - saved.folded, saved.tensors
        self.state[:, sequence] = state
        for buffer, part in zip(self._slot_buffers(), kept, strict=True):
            buffer[:, sequence, :left] = part[:, :left]
        self.folded[sequence] = saved.folded

    def wipe(self, sequence: int, count: int) -> None:
        for buffer in self._slot_buffers():
            buffer[:, sequence].zero_()
        self.clear(sequence)
