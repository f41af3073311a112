"""KV cache of one model: prefix region of verified tokens, then the tree region (paper section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

# sequence, ascending source slots, first destination slot: moves keys and values to consecutive slots
MoveSlots = Callable[[int, Sequence[int], int], None]
SlotMoverFactory = Callable[[Tensor, Tensor], MoveSlots]  # k and v of a cache -> its MoveSlots


class KVCache:
    """KV cache of one model: the buffers `k` and `v` are [layers, sequences, kv_heads, capacity, head_dim].

    Each sequence s has `capacity` slots: `prefix_len[s]` slots of verified tokens, then `tree_len` slots of the tree,
    the same number in every sequence (except after `commit_sequence`). Tree slots are allocated in order and never
    reused in place, so their order is topological and the root has tree slot 0. `commit` moves keys and values to lower
    slots and recomputes nothing.
    """

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, capacity: int, make_slot_mover: SlotMoverFactory, *,
        sequences: int = 1, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self.capacity, self._make_slot_mover = capacity, make_slot_mover
        self._shape, self._dtype, self._device = (layers, kv_heads, capacity, head_dim), dtype, device
        self.prefix_len: list[int] = []
        self.reset(sequences)

    def reset(self, sequences: int = 1) -> None:
        """Empties the cache. A different number of sequences reallocates the buffers."""
        if sequences != len(self.prefix_len):
            self.prefix_len = []  # if the allocation fails, the next call tries again
            self.k = self.v = torch.empty(0)  # frees the old buffer before the new one is allocated
            self._move: MoveSlots | None = None
            # The system maps zero pages lazily, so a long context uses memory only as it fills. Free slots must be
            # finite: a masked NaN would still propagate through sums.
            shape, kind, device = (self._shape[0], sequences, *self._shape[1:]), self._dtype, self._device
            self.k, self.v = (torch.zeros(shape, dtype=kind, device=device) for _ in range(2))
            self._move = self._make_slot_mover(self.k, self.v)
        self.prefix_len = [0] * sequences
        self.tree_len = 0

    @property
    def free_slots(self) -> int:
        """Free slots of the sequence with the longest prefix; every sequence has at least this many."""
        return self.capacity - max(self.prefix_len) - self.tree_len

    def kv_len(self) -> list[int]:
        """Returns the number of slots in use of each sequence."""
        return [p + self.tree_len for p in self.prefix_len]

    def append_prefix(self, count: int, sequence: int = 0) -> int:
        """Allocates `count` prefix slots of a sequence. The tree must be empty. Returns the first slot."""
        assert self.tree_len == 0 and self.prefix_len[sequence] + count <= self.capacity
        self.prefix_len[sequence] += count
        return self.prefix_len[sequence] - count

    def append_tree(self, count: int) -> int:
        """Allocates `count` tree slots in every sequence. Returns the first one, counted from the start of the tree
        region."""
        assert count <= self.free_slots
        self.tree_len += count
        return self.tree_len - count

    def commit(self, path: Sequence[int], keep: Sequence[int] = ()) -> None:
        """Appends the tree slots `path` to the prefix, makes `keep` the new tree slots, and frees all other tree slots.

        Both lists must ascend, and all slots of `keep` must come after those of `path`, as descendants do, so that data
        moves only to lower slots.
        """
        assert max((*path, *keep), default=-1) < self.tree_len
        for sequence in range(len(self.prefix_len)):
            self.commit_sequence(sequence, path, keep)
        self.tree_len = len(keep)

    def commit_sequence(self, sequence: int, path: Sequence[int], keep: Sequence[int] = ()) -> None:
        """As `commit`, in one sequence and without an update of `tree_len`: the caller counts its tree slots."""
        order, start = [*path, *keep], self.prefix_len[sequence]
        assert all(a < b for a, b in pairwise(order))
        still = next(
            (i for i, slot in enumerate(order) if slot != i), len(order)
        )  # the leading slots are already in place
        if still < len(order):
            assert self._move is not None
            self._move(sequence, [slot + start for slot in order[still:]], start + still)
        self.prefix_len[sequence] += len(path)
