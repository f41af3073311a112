"""Cache of one model: the slots of its sequences, and a cache for each kind of layer that holds their states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from swiftspec.cache.delta import DeltaCache
from swiftspec.cache.kv import KVCache
from swiftspec.cache.layer_cache import LayerCache


class ModelCache:
    """Cache of one model. `kv` holds the keys and values of its attention layers, those of the first shape if the
    layers differ in KV heads or head dimension; `further` holds those of the other shapes. `delta` holds the states of
    its delta layers; None: it has none.

    Each sequence s has `capacity` slots: `prefix_len[s]` slots of verified tokens, then `tree_len` slots of the tree,
    the same number in every sequence (except after `commit_sequence`). Tree slots are allocated in order and never
    reused in place, so their order is topological and the root has tree slot 0. `commit` moves states to lower slots
    and recomputes nothing.

    This class counts slots and the caches in `kinds` hold the states, so that a further kind of layer needs a further
    `LayerCache` and no change here or in the code that commits, compacts or copies.
    """

    def __init__(
        self, kv: KVCache, sequences: int = 1, further: Sequence[KVCache] = (), delta: DeltaCache | None = None
    ) -> None:
        self.kv, self.delta, self.capacity = kv, delta, kv.capacity
        self.kinds: tuple[LayerCache, ...] = (kv, *further) if delta is None else (kv, *further, delta)
        self.prefix_len: list[int] = []
        self.buffers: Sequence[int] = ()  # index of each sequence in the buffers of `kinds`
        self.reset(sequences)

    def reset(self, sequences: int = 1) -> None:
        """Empties the cache. A different number of sequences reallocates the buffers."""
        if sequences != len(self.prefix_len):
            self.prefix_len = []  # if an allocation fails, the next call tries again
            for kind in self.kinds:
                kind.allocate(sequences)
        self.prefix_len, self.buffers = [0] * sequences, range(sequences)
        self.tree_len = 0
        for kind in self.kinds:
            for sequence in range(sequences):
                kind.clear(sequence)

    @property
    def free_slots(self) -> int:
        """Free slots of the sequence with the longest prefix; every sequence has at least this many."""
        return self.capacity - max(self.prefix_len) - self.tree_len

    def kv_len(self) -> list[int]:
        """Returns the number of slots in use of each sequence."""
        return [p + self.tree_len for p in self.prefix_len]

    def buffer_kv_len(self) -> list[int]:
        """Returns the number of slots in use of each sequence of the buffers, as a batch needs it."""
        return self.kv_len()

    def append_prefix(self, count: int, sequence: int = 0) -> int:
        """Allocates `count` prefix slots of a sequence. The tree must be empty. Returns the first slot."""
        assert self.tree_len == 0 and self.prefix_len[sequence] + count <= self.capacity
        self._settle(sequence, 0)
        self.prefix_len[sequence] += count
        return self.prefix_len[sequence] - count

    def append_written(self, prefix: int, tree: int = 0) -> None:
        """Counts slots of every sequence that native code has written already: `prefix` prefix slots, and `tree` tree
        slots after them. The tree must be empty if `prefix` is above 0."""
        assert prefix == 0 or self.tree_len == 0
        self.tree_len += tree
        for sequence in range(len(self.prefix_len)):
            self.prefix_len[sequence] += prefix
            self._settle(sequence, self.tree_len)

    def append_tree(self, count: int) -> int:
        """Allocates `count` tree slots in every sequence. Returns the first one, counted from the start of the tree
        region."""
        assert count <= self.free_slots
        self.tree_len += count
        return self.tree_len - count

    def commit(self, path: Sequence[int], keep: Sequence[int] = ()) -> None:
        """Appends the tree slots `path` to the prefix, makes `keep` the new tree slots, and frees all other tree slots.
        With an empty `path` this is a compaction of the tree.

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
            moved = [slot + start for slot in order[still:]]
            for kind in self.kinds:
                kind.move(self.buffers[sequence], moved, start + still)
        self.prefix_len[sequence] += len(path)
        self._settle(sequence, len(keep))

    def _settle(self, sequence: int, tree_slots: int) -> None:
        """Calls `LayerCache.settle` for the prefix of a sequence. `tree_slots`: tree slots in use."""
        verified = self.prefix_len[sequence]
        for kind in self.kinds:
            kind.settle(self.buffers[sequence], verified, verified + tree_slots)

    def reusable_len(self, sequence: int, count: int) -> int:
        """Returns the largest number of verified tokens of a sequence, at most `count`, that can be the prefix of
        another text, or be copied. The sequence holds at least `count`."""
        return longest(count, [partial(kind.reusable_len, self.buffers[sequence]) for kind in self.kinds])

    def saved_len(self, saved: Sequence[Any], count: int) -> int:
        """As `reusable_len`, for copies from `save_prefix`."""
        return longest(count, [partial(kind.saved_len, copy) for kind, copy in zip(self.kinds, saved, strict=True)])

    def take_snapshot(self, sequence: int) -> None:
        """Keeps the states after the verified tokens of a sequence, so that `reusable_len` includes their number until
        the prefix is replaced. The tree must be empty."""
        assert self.tree_len == 0
        self._settle(sequence, 0)
        for kind in self.kinds:
            kind.snapshot(self.buffers[sequence], self.prefix_len[sequence])

    def num_snapshots(self, sequence: int, count: int) -> int:
        """Returns the number of states that `save_prefix` returns in addition to those of the tokens, by which the size
        of the copies grows; 0 if every kind of layer has a state for each token."""
        return sum(kind.num_snapshots(self.buffers[sequence], count) for kind in self.kinds)

    def set_prefix(self, sequence: int, count: int, source: int | None = None) -> None:
        """Makes `count` verified tokens the prefix of a sequence: those that it holds already, or, with `source`,
        copies of the first `count` tokens of that sequence. `count`: a result of `reusable_len`. The tree must be
        empty."""
        for kind in self.kinds:
            if source is not None and source != sequence and count > 0:
                kind.copy_prefix(self.buffers[source], self.buffers[sequence], count)
            else:
                kind.truncate(self.buffers[sequence], count)
        self.prefix_len[sequence] = count

    def save_prefix(self, sequence: int, count: int) -> tuple[Any, ...]:
        """Returns copies of the states of the first `count` tokens of a sequence, one for each kind of layer. `count`:
        a result of `reusable_len`."""
        return tuple(kind.save_prefix(self.buffers[sequence], count) for kind in self.kinds)

    def load_prefix(self, sequence: int, saved: Sequence[Any], count: int) -> None:
        """Makes copies of the states of the first `count` tokens from `save_prefix` the prefix of a sequence. `count`:
        a result of `saved_len`. The tree must be empty."""
        for kind, copy in zip(self.kinds, saved, strict=True):
            kind.load_prefix(self.buffers[sequence], copy, count)
        self.prefix_len[sequence] = count

    def drop_tree(self) -> None:
        """Frees all tree slots."""
        self.tree_len = 0

    def wipe(self, sequence: int, tree_slots: int) -> None:
        """Zeroes the prefix and the first `tree_slots` tree slots of a sequence, and empties its prefix."""
        for kind in self.kinds:
            kind.wipe(self.buffers[sequence], self.prefix_len[sequence] + tree_slots)
        self.prefix_len[sequence] = 0


class SequenceView(ModelCache):
    """Some sequences of another cache: it counts their slots apart from those of the other sequences, so that every
    request has a tree of its own size. Sequence i is the one with the index `buffers[i]`."""

    def __init__(self, whole: ModelCache) -> None:
        self._whole, self.kv, self.delta, self.kinds = whole, whole.kv, whole.delta, whole.kinds
        self.capacity = whole.capacity
        self.view([])

    def view(self, buffers: Sequence[int]) -> None:
        """Makes these sequences the ones of the view, with the prefixes that the other cache has recorded, and an empty
        tree."""
        self.buffers, self.tree_len = buffers, 0
        self.prefix_len = [self._whole.prefix_len[index] for index in buffers]

    def reset(self, sequences: int = 0) -> None:
        """Zeroes its sequences and empties their prefixes. The number of sequences does not change."""
        for sequence in range(len(self.prefix_len)):
            self.wipe(sequence, self.tree_len)
        self.tree_len = 0

    def buffer_kv_len(self) -> list[int]:
        lengths = [0] * len(self._whole.prefix_len)
        for index, length in zip(self.buffers, self.kv_len(), strict=True):
            lengths[index] = length
        return lengths


def longest(count: int, limits: Sequence[Callable[[int], int]]) -> int:
    """Returns the largest number, at most `count`, that each of `limits` returns for itself; each returns a number that
    is at most its argument."""
    while True:
        least = min((limit(count) for limit in limits), default=count)
        if least == count:
            return count
        count = least
