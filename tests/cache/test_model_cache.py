"""The slot accounting of a model's cache, with the KV of a slot replaced by a number that identifies its token."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swiftspec.backends.cpu import cpu as host
from swiftspec.backends.reference import reference
from swiftspec.cache.kv import KVCache
from swiftspec.cache.model_cache import ModelCache
from tests.support.cases import examples

CAPACITY = 40
POISON = 1e4  # in every slot that is free


class CacheMachine(RuleBasedStateMachine):
    """Two sequences with unequal prefixes under one tree; every written slot has a unique number."""

    make_slot_mover = staticmethod(reference.make_slot_mover)

    def __init__(self) -> None:
        super().__init__()
        self.cache = ModelCache(KVCache(2, 1, 2, CAPACITY, self.make_slot_mover, dtype=torch.float64), 2)
        self._poison()
        self.prefix: list[list[float]] = [[], []]
        self.tree: list[float] = []
        self.next = 1.0
        for sequence, length in ((0, 3), (1, 5)):
            first = self.cache.append_prefix(length, sequence)
            for slot in range(first, first + length):
                self.prefix[sequence].append(self._write(slot, sequence))

    def _write(self, slot: int, sequence: int, value: float | None = None) -> float:
        if value is None:
            value, self.next = self.next, self.next + 1
        for tensor in (self.cache.kv.k, self.cache.kv.v):
            assert (tensor[:, sequence, :, slot] == POISON).all(), "a slot in use was handed out again"
            tensor[:, sequence, :, slot] = value
        return value

    @rule(count=st.integers(1, 6))
    def append(self, count: int) -> None:
        if count > self.cache.free_slots:
            return
        first = self.cache.append_tree(count)
        for slot in range(first, first + count):
            value = self._write(slot + self.cache.prefix_len[0], 0)
            self._write(slot + self.cache.prefix_len[1], 1, value)
            self.tree.append(value)

    @precondition(lambda self: bool(self.tree))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        slots = sorted(data.draw(st.sets(st.integers(0, len(self.tree) - 1))))
        cut = data.draw(st.integers(0, len(slots)))
        path, keep = slots[:cut], slots[cut:]
        self.cache.commit(path, keep)
        for prefix in self.prefix:
            prefix += [self.tree[s] for s in path]
        self.tree = [self.tree[s] for s in keep]
        self._poison()

    def _poison(self) -> None:
        for sequence, used in enumerate(self.cache.kv_len()):
            self.cache.kv.k[:, sequence, :, used:] = POISON
            self.cache.kv.v[:, sequence, :, used:] = POISON

    @invariant()
    def live_slots_hold_their_tokens(self) -> None:
        for sequence, prefix in enumerate(self.prefix):
            live = [*prefix, *self.tree]
            assert self.cache.kv_len()[sequence] == len(live)
            for tensor in (self.cache.kv.k, self.cache.kv.v):
                for layer in tensor[:, sequence, 0, : len(live), 0]:
                    assert layer.tolist() == live
        assert self.cache.free_slots == CAPACITY - max(len(p) for p in self.prefix) - len(self.tree)


CacheMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=20)
TestModelCache = CacheMachine.TestCase


class NativeCacheMachine(CacheMachine):
    """The same with the native move, which supports any dtype."""

    make_slot_mover = staticmethod(host.make_slot_mover)


NativeCacheMachine.TestCase.settings = CacheMachine.TestCase.settings
TestNativeModelCache = NativeCacheMachine.TestCase


def test_slots_in_their_final_position_are_not_moved() -> None:
    moves: list[tuple[list[int], int]] = []

    kv = KVCache(1, 1, 2, 16, lambda k, v: lambda sequence, source, start: moves.append(([*source], start)))
    cache = ModelCache(kv)
    cache.append_prefix(2)
    cache.append_tree(6)
    cache.commit([0, 1], [2])
    assert moves == [] and cache.prefix_len == [4] and cache.tree_len == 1
    cache.append_tree(3)
    cache.commit([0, 2], [3])
    assert moves == [([6, 7], 5)]


STATM = Path("/proc/self/statm")


@pytest.mark.skipif(not STATM.exists(), reason="the size of the resident memory is read from /proc")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_long_context_uses_memory_as_it_fills(dtype: torch.dtype) -> None:
    def resident_bytes() -> int:
        return int(STATM.read_text().split()[1]) * resource.getpagesize()

    cache, before = KVCache(2, 2, 64, 1 << 20, reference.make_slot_mover, dtype=dtype), resident_bytes()
    cache.allocate(1)
    assert cache.k.nbytes >= 1 << 28 and cache.k.dtype == dtype and cache.k.shape == cache.v.shape
    cache.k[:, :, :, 1000] = 1.0
    assert cache.k[0, 0, 1, 1000].float().sum() == 64 and cache.k[:, :, :, 999:1002].float().sum() == 4 * 64
    assert not cache.v[..., -1, :].float().any() and resident_bytes() - before < 1 << 26
