"""Delta layers on the native CPU operators: a row has the same bits however a text is cut into chunks and trees, at
every ISA level and with any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cpu import cpu
from swiftspec.backends.reference import reference
from swiftspec.cache.delta import DeltaCache
from swiftspec.cache.kv import KVCache
from swiftspec.cache.model_cache import ModelCache
from swiftspec.model.batch import Batch
from swiftspec.model.packed_model import DeltaShape, PackedDelta

pytestmark = pytest.mark.skipif(cpu.level() == "none", reason="there are no native operators here")
SHAPE = DeltaShape(layers=1, k_heads=2, v_heads=6, k_head_dim=48, v_head_dim=80, conv_size=672, conv_width=4)
COUNT, SLOTS, CAPACITY = 210, 300, 400


def drawn(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def weights_of(dtype: torch.dtype) -> PackedDelta:
    factor = -torch.tensor([1e-3, 1e-2, 0.1, 1.0, 4.0, 16.0])  # from states that last to states that vanish in a step
    norm = cpu.pack_norm(1 + drawn(SHAPE.v_head_dim, seed=1), 1e-6, dtype, "cpu")
    return PackedDelta(None, drawn(SHAPE.conv_width, SHAPE.conv_size, seed=2), factor, drawn(6, seed=3), norm)


@pytest.fixture(params=_C.levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    assert cpu.use_level(request.param)
    yield request.param
    cpu.use_level(_C.levels()[0])


class Text:
    """A text of COUNT tokens, of which token i has the projections `projected[i]` and `rates[i]`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.projected = drawn(COUNT, SHAPE.conv_size + SHAPE.v_heads * SHAPE.v_head_dim, seed=4).to(dtype)
        self.rates = drawn(COUNT, 2 * SHAPE.v_heads, seed=5).to(dtype)
        self.weights = weights_of(dtype)
        self.delta = DeltaCache(SHAPE, SLOTS, cpu, dtype=dtype)
        self.cache = ModelCache(KVCache(1, 1, 16, CAPACITY, cpu.make_slot_mover), delta=self.delta)

    def run(self, tokens: list[int], slots: list[int], mask: Any, used: int) -> Tensor:
        places = torch.tensor(slots)
        batch = Batch(places, places, places, torch.from_numpy(mask), 0 * places, torch.tensor([used]))
        plan = cpu.prepare_delta(batch, self.delta)
        return cpu.gated_delta(self.projected[tokens], self.rates[tokens], plan, 0, self.weights)

    def chunk(self, first: int, last: int) -> Tensor:
        self.cache.append_prefix(last - first)
        rows = list(range(first, last))
        return self.run(rows, rows, np.tri(last - first, dtype=np.bool_), last)

    def round(self, first: int, rows: int) -> Tensor:
        """The tokens from `first` on as a path through a tree that has a rejected sibling of every node, so that long
        paths have fold points behind slots that they do not see."""
        start = self.cache.append_tree(2 * rows)
        tokens = [first + i // 2 if i % 2 == 0 else (7 * i) % COUNT for i in range(2 * rows)]
        mask = np.zeros((2 * rows, 2 * rows), np.bool_)
        for i in range(2 * rows):
            mask[i, : i - i % 2 : 2] = mask[i, i] = True
        out = self.run(tokens, [first + start + i for i in range(2 * rows)], mask, first + 2 * rows)
        self.cache.commit(range(0, 2 * rows, 2))
        return out[::2]


def whole(dtype: torch.dtype) -> Tensor:
    return Text(dtype).chunk(0, COUNT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_chunk_and_tree(level: str, dtype: torch.dtype) -> None:
    want, text = whole(dtype), Text(dtype)
    ends = [0, 1, 30, 31, 32, 33, 40, 63, 64, 90, 96, 97, 130]
    got = [text.chunk(*pair) for pair in pairwise(ends)]
    at = ends[-1]
    for rows in (1, 7, 3, 69):
        got.append(text.round(at, rows))
        at += rows
    assert at == COUNT and torch.equal(torch.cat(got), want)


def test_levels_and_threads_agree(level: str) -> None:
    cpu.set_threads(1)
    alone = whole(torch.float32)
    cpu.set_threads(3)
    several = whole(torch.float32)
    cpu.set_threads(1)
    assert cpu.use_level(_C.levels()[-1])
    assert torch.equal(alone, several) and torch.equal(alone, whole(torch.float32))


def test_a_padded_head_and_subnormal_factors_stay_finite() -> None:
    """A head of zeros, as the padding of a shard; decays whose products would be subnormal."""
    text = Text(torch.float32)
    text.projected[:, :96] = 0
    text.rates[:, 9:] = 20
    assert bool(text.chunk(0, COUNT).isfinite().all())


def test_the_output_gate_reads_a_part_of_a_product() -> None:
    product, x = drawn(5, 200, seed=6).bfloat16(), drawn(5, 70, seed=7).bfloat16()
    want = reference.multiply_sigmoid(x, product[:, 130:])
    assert torch.equal(cpu.multiply_sigmoid(x.clone(), product[:, 130:]), want)
