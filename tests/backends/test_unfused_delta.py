"""Delta layers in torch kernels of fixed shapes: they compute what reference/ computes, and read nothing from the
device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swiftspec.backends.reference import reference
from swiftspec.backends.unfused import unfused
from swiftspec.cache.delta import DeltaCache
from swiftspec.cache.kv import KVCache
from swiftspec.cache.model_cache import ModelCache
from swiftspec.model.batch import Batch
from swiftspec.model.packed_model import DeltaShape, PackedDelta
from tests.support.fake_cuda_graphs import Recorder

F64 = torch.float64
SHAPE = DeltaShape(layers=1, k_heads=2, v_heads=4, k_head_dim=16, v_head_dim=16, conv_size=128, conv_width=4)
COUNT, SLOTS = 200, 160


def drawn(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=F64)


PROJECTED, RATES = drawn(COUNT, 192, seed=1), drawn(COUNT, 8, seed=2)
WEIGHTS = PackedDelta(
    None, drawn(4, 128, seed=3), -drawn(4, seed=4).exp() / 20, drawn(4, seed=5),
    reference.pack_norm(1 + drawn(16, seed=6), 1e-6, F64, "cpu"),
)  # fmt: skip


class Sequence:
    def __init__(self, ops: Any) -> None:
        self.ops, self.delta = ops, DeltaCache(SHAPE, SLOTS, ops, dtype=F64)
        self.cache = ModelCache(KVCache(1, 1, 16, 400, ops.make_slot_mover), delta=self.delta)

    def batch(self, slots: list[int], mask: Any) -> Batch:
        places = torch.tensor(slots)
        used = torch.tensor([self.cache.kv_len()[0]])
        return Batch(places, places, places, torch.from_numpy(mask), torch.zeros_like(places), used)

    def run(self, tokens: list[int], slots: list[int], mask: Any) -> Tensor:
        plan = self.ops.prepare_delta(self.batch(slots, mask), self.delta)
        return self.ops.gated_delta(PROJECTED[tokens], RATES[tokens], plan, 0, WEIGHTS)

    def prefill(self, count: int) -> Tensor:
        first = self.cache.append_prefix(count)
        rows = [*range(first, first + count)]
        return self.run(rows, rows, np.tri(count, dtype=np.bool_))

    def tree(self, tokens: list[int], parents: list[int], order: list[int]) -> Tensor:
        """Runs the nodes of a tree as the rows `order`, some of which may be equal."""
        start, first = self.cache.append_tree(len(tokens)), self.cache.prefix_len[0]
        assert start == 0
        mask = np.zeros((len(tokens), len(tokens)), np.bool_)
        for node, parent in enumerate(parents):
            mask[node] = mask[parent] if parent >= 0 else False
            mask[node, node] = True
        return self.run([tokens[node] for node in order], [first + node for node in order], mask[order])


@pytest.mark.parametrize("count", [1, 2, 31, 33, 64, 65, 100])
def test_equals_the_reference(count: int) -> None:
    """In a chunk, then in a tree whose rows are in any order and padded, before and after a commit."""
    dice = np.random.default_rng(count)
    sequences = [Sequence(ops) for ops in (reference, unfused)]
    results = [each.prefill(count) for each in sequences]
    torch.testing.assert_close(*results, rtol=0, atol=1e-10)
    for nodes in (1, 7, 40, 20):
        tokens = dice.integers(0, COUNT, nodes).tolist()
        parents = [-1, *(max(node - 1 - int(dice.integers(0, 3)), 0) for node in range(1, nodes))]
        order = [*dice.permutation(nodes).tolist(), nodes - 1, nodes - 1]
        results = [each.tree(tokens, parents, order) for each in sequences]
        torch.testing.assert_close(*results, rtol=0, atol=1e-10)
        path = [nodes - 1]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        for each in sequences:
            each.cache.commit(path)
        assert sequences[0].delta.folded_on_device.tolist() == sequences[1].delta.folded.tolist()


@pytest.mark.slow
def test_a_recorded_forward_follows_the_folds() -> None:
    """A graph that was captured before a fold replays correctly after it."""
    eager, captured = Sequence(unfused), Sequence(unfused)
    parts = [("projected", PROJECTED[:1].clone()), ("rates", RATES[:1].clone())]
    projected, rates = (part for _, part in parts)
    captured.cache.append_prefix(1)
    batch = captured.batch([0], np.ones((1, 1), np.bool_))

    def forward() -> Tensor:
        plan = unfused.prepare_delta(batch, captured.delta)
        return unfused.gated_delta(projected, rates, plan, 0, WEIGHTS)

    out, replay = Recorder()(forward)
    captured.cache.reset(1)
    for token in range(150):
        want = eager.prefill(1)
        captured.cache.append_prefix(1)
        projected.copy_(PROJECTED[token : token + 1])
        rates.copy_(RATES[token : token + 1])
        for part in (batch.slots, batch.kv_len):
            part.fill_(token + (part is batch.kv_len))
        replay()
        torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    assert captured.delta.folded.tolist() == [96]
