"""Delta cache: recurrent states of the delta layers of a model, and what its latest slots add to them.

A delta layer computes S_t = e^g S_(t-1) + k u', with the key k, the decay g <= 0 and the update u of position t. The
cache holds the folded state, S after the first `folded` positions of a sequence, and k, u, g and the convolution's
input of every later slot, of the prefix as of the tree. The state of a node is the folded state plus what its
ancestors' slots add, so a tree needs no copies of states, and a commit recomputes nothing.

A row at position p reads the state of the positions before `fold_point(p)` and its ancestors' slots from there on. The
fold point depends on the position alone, so the terms of a row's sums are the same wherever rounds and prefill chunks
end. It lies 32 to 63 positions before p, so the slots from it on contain the window of the convolution. A tree that is
at most 32 levels deep has its fold points in the prefix; a deeper row folds its own path up to the fold point, for that
forward only.
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
MAX_SNAPSHOTS = 3  # of a sequence


class DeltaSizes(Protocol):
    """Sizes of the delta layers of a model; `model.packed_model.DeltaShape` implements and documents them."""

    @property
    def layers(self) -> int: ...
    @property
    def k_heads(self) -> int: ...
    @property
    def v_heads(self) -> int: ...
    @property
    def k_head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...
    @property
    def conv_size(self) -> int: ...
    @property
    def conv_width(self) -> int: ...


class DeltaCacheOps(Protocol):
    """The operators of a delta cache; swiftspec.backends.reference documents them."""

    def fold_state(self, state: Tensor, keys: Tensor, updates: Tensor, decays: Tensor, /) -> None: ...
    def move_slots(self, buffer: Tensor, sequence: int, slots: Sequence[int], first: int, /) -> None: ...


def fold_point(position: int) -> int:
    """Returns the number of positions whose state a row at `position` reads in folded form."""
    return max(position // FOLD_POSITIONS - 1, 0) * FOLD_POSITIONS


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The states of a sequence's first `count` slots: the state of the first `folded` ones, and the later slots."""

    folded: int
    count: int
    state: Tensor  # [layers, v_heads, k_head_dim, v_head_dim]
    slots: tuple[Tensor, ...]  # of each buffer [layers, count - folded, ...]

    def reusable_len(self, count: int) -> int:
        """Returns the largest number of slots, at most `count`, that can be the prefix of another text."""
        count = min(count, self.count)
        return count if self.folded <= fold_point(count) else 0


class DeltaCache:
    """A `LayerCache` of delta layers.

    `state` is [layers, sequences, v_heads, k_head_dim, v_head_dim]. Index i of the slots of `keys` [layers, sequences,
    slots, k_heads, k_head_dim], `updates` [layers, sequences, slots, v_heads, v_head_dim], `decays` [layers, sequences,
    slots, v_heads] and `inputs` [layers, sequences, slots, conv_size] is slot `folded[sequence] + i` of the model
    cache.

    A fold cannot be undone, so another text can begin with the first slots of a sequence only if none of them that its
    rows read are folded, or if a snapshot has them.
    """

    def __init__(
        self,
        shape: DeltaSizes,
        slots: int,
        ops: DeltaCacheOps,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """`slots`: most slots of a sequence that are in use and not folded. `dtype`: that of the model, for `inputs`;
        the other buffers are float32, or float64 in a float64 model."""
        self.shape, self._slots, self._ops = shape, slots, ops
        self._dtype, self._device = dtype, device
        self.folded = np.zeros(0, np.int64)  # [sequences], read by native code
        self.folded_on_device = torch.empty(0)  # the same, read by captured forwards
        self._snapshots: list[list[_Snapshot]] = []  # by sequence, ascending
        self.state = self.keys = self.updates = self.decays = self.inputs = torch.empty(0)

    @property
    def conv_width(self) -> int:
        """Positions that the convolution reads."""
        return self.shape.conv_width

    def allocate(self, sequences: int) -> None:
        self.state = self.keys = self.updates = self.decays = self.inputs = torch.empty(0)  # frees the old buffers
        wide, size = torch.promote_types(self._dtype, torch.float32), (self.shape.layers, sequences)
        shape = self.shape
        state = shape.v_heads, shape.k_head_dim, shape.v_head_dim
        by_slot = (shape.k_heads, shape.k_head_dim), (shape.v_heads, shape.v_head_dim), (shape.v_heads,)
        self.state = torch.zeros(*size, *state, dtype=wide, device=self._device)
        self.keys, self.updates, self.decays = (
            torch.zeros(*size, self._slots, *each, dtype=wide, device=self._device) for each in by_slot
        )
        self.inputs = torch.zeros(*size, self._slots, shape.conv_size, dtype=self._dtype, device=self._device)
        self.folded = np.zeros(sequences, np.int64)
        self.folded_on_device = torch.from_numpy(self.folded).to(self._device)  # on a CPU the same memory
        self._snapshots = [[] for _ in range(sequences)]

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
        self._set_folded(sequence, folded + count)

    def reusable_len(self, sequence: int, count: int) -> int:
        live = count if self.folded[sequence] <= fold_point(count) else 0
        return max([live, *(each.reusable_len(count) for each in self._snapshots[sequence])])

    def saved_len(self, saved: Sequence[_Snapshot], count: int) -> int:
        return max(each.reusable_len(count) for each in saved)

    def snapshot(self, sequence: int, count: int) -> None:
        """As in `LayerCache`; keeps at most MAX_SNAPSHOTS. The first one stays, because most texts share it, and then
        the latest ones."""
        kept = [each for each in self._snapshots[sequence] if each.count != count]
        if len(kept) == MAX_SNAPSHOTS:
            del kept[1]
        self._snapshots[sequence] = sorted([*kept, self._copy(sequence, count)], key=lambda each: each.count)

    def num_snapshots(self, sequence: int, count: int) -> int:
        return len(self._earlier(sequence, count)) + 1

    def truncate(self, sequence: int, count: int) -> None:
        if count == 0:
            self.clear(sequence)
        elif self.folded[sequence] > fold_point(count):
            self.load_prefix(sequence, self._snapshots[sequence], count)
        else:
            self._snapshots[sequence] = [each for each in self._snapshots[sequence] if each.count <= count]

    def clear(self, sequence: int) -> None:
        self._set_folded(sequence, 0)
        self.state[:, sequence].zero_()
        self._snapshots[sequence] = []

    def copy_prefix(self, source: int, destination: int, count: int) -> None:
        self.load_prefix(destination, self.save_prefix(source, count), count)

    def save_prefix(self, sequence: int, count: int) -> list[_Snapshot]:
        """Returns the snapshots of the first `count` slots, and one after all of them."""
        last = next((each for each in self._snapshots[sequence] if each.reusable_len(count) == count), None)
        if self.folded[sequence] <= fold_point(count):
            last = self._copy(sequence, count)
        assert last is not None, "the state after these slots is gone"
        return [*self._earlier(sequence, count), last]

    def load_prefix(self, sequence: int, saved: Sequence[_Snapshot], count: int) -> None:
        if count == 0:
            self.clear(sequence)
            return
        source = next(each for each in saved if each.reusable_len(count) == count)
        self.state[:, sequence] = source.state
        for buffer, part in zip(self._slot_buffers(), source.slots, strict=True):
            buffer[:, sequence, : count - source.folded] = part[:, : count - source.folded]
        self._set_folded(sequence, source.folded)
        self._snapshots[sequence] = [each for each in saved if each.count <= count]

    def _set_folded(self, sequence: int, count: int) -> None:
        self.folded[sequence] = count
        self.folded_on_device[sequence].fill_(count)

    def _earlier(self, sequence: int, count: int) -> list[_Snapshot]:
        return [each for each in self._snapshots[sequence] if each.count < count]

    def _copy(self, sequence: int, count: int) -> _Snapshot:
        folded = int(self.folded[sequence])
        assert folded <= fold_point(count)
        slots = tuple(buffer[:, sequence, : count - folded].clone() for buffer in self._slot_buffers())
        return _Snapshot(folded, count, self.state[:, sequence].clone(), slots)

    def wipe(self, sequence: int, count: int) -> None:
        for buffer in self._slot_buffers():
            buffer[:, sequence].zero_()
        self.clear(sequence)
