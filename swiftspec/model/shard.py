"""How a model is cut for a group of ranks, of any size (paper section 4, "arbitrary tensor parallelism").

Every rank gets the same local shape; what does not divide is filled up with zeros that contribute nothing. Letters: H
query heads, G key-value heads, g = H / G, hd the head's width, I the MLP's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swiftspec.errors import UserError
from swiftspec.model.config import ModelConfig
from swiftspec.model.formats import format_of
from swiftspec.model.weights import LayerWeights, ModelWeights, Weight

INNER_UNIT = 16  # what kernels want a projection's inputs to be a multiple of
EIGHT = 8  # int4 weights are packed by eights along N


@dataclass(frozen=True, slots=True)
class HeadCut:
    """Every key-value head is cut into units of `width` query heads; each rank gets `per_rank` units.

    A unit is a local key-value head with its `width` query heads; units that share a key-value head each hold a copy.
    """

    width: int  # u
    per_rank: int

    @staticmethod
    def of(heads: int, kv_heads: int, size: int) -> HeadCut:
        """The cut with the least weight on a rank (2u + 2 heads a unit); of equal ones that with the wider units."""
        group = heads // kv_heads

        def per_rank(width: int) -> int:
            return _ceil(kv_heads * _ceil(group, width), size)

        width = min(range(group, 0, -1), key=lambda width: (2 * width + 2) * per_rank(width))
        return HeadCut(width, per_rank(width))

    def heads_of(self, rank: int, heads: int, kv_heads: int) -> tuple[list[int], list[int]]:
        """A rank's query heads [per_rank * u] and key-value heads [per_rank] by their number in the model, or -1."""
        group = heads // kv_heads
        units = _ceil(group, self.width)  # of one key-value head
        q: list[int] = []
        kv: list[int] = []
        for unit in range(rank * self.per_rank, (rank + 1) * self.per_rank):
            owner, part = divmod(unit, units)
            kv.append(owner if owner < kv_heads else -1)
            members = range(part * self.width, (part + 1) * self.width)
            q += [owner * group + member if owner < kv_heads and member < group else -1 for member in members]
        return q, kv


@dataclass(frozen=True, slots=True)
class Shard:
    """The rows and columns of one rank, int64 [local size], by their number in the whole matrix; -1 stands for zeros.

    A padding query head has no columns in O, a padding row of the MLP none in down, so both contribute nothing.
    """

    rank: int
    size: int
    num_heads: int  # of this rank, padding counted
    kv_heads: int
    head_dim: int
    inner_unit: int  # `down` is in aligned runs of this
    qkv: Tensor  # rows: [(num_heads + 2 kv_heads) hd]
    o: Tensor  # columns: [num_heads * hd], in aligned runs of hd
    gate_up: Tensor  # rows
    down: Tensor  # columns
    vocab: Tensor  # rows of the head, after those of the rank before

    @staticmethod
    def of(config: ModelConfig, rank: int, size: int) -> Shard:
        """Raises UserError where so many ranks cannot share the model."""
        heads, kv_heads, width, inner = config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size
        if size > heads:
            raise UserError(f"a model of {heads} query heads cannot be cut for {size} ranks: take {heads} at most")
        layout = format_of(config)
        if size > 1 and layout is not None and width % EIGHT:
            raise UserError(f"int4 weights are cut by eights, heads of {width} are not: take one rank or dense weights")
        cut = HeadCut.of(heads, kv_heads, size)
        q_heads, own_kv_heads = cut.heads_of(rank, heads, kv_heads)
        q, kv = _spread(q_heads, width), _spread(own_kv_heads, width)
        unit = INNER_UNIT if layout is None else layout.group_size
        rows = _deal(inner, unit, rank, size)
        return Shard(
            rank=rank,
            size=size,
            num_heads=len(q_heads),
            kv_heads=len(own_kv_heads),
            head_dim=width,
            inner_unit=unit,
            qkv=torch.cat((q, _after(heads * width, kv), _after((heads + kv_heads) * width, kv))),
            o=q,
            gate_up=torch.cat((rows, _after(inner, rows))),
            down=rows,
            vocab=_deal(config.vocab_size, EIGHT, rank, size),
        )

    @property
    def head_rows(self) -> int:
        """Rows of the head, padding counted."""
        return len(self.vocab)

    def cut(self, weights: ModelWeights) -> ModelWeights:
        """This rank's share. The embedding is whole on every rank."""
        layers = [partial(self._layer, read) for read in weights.layers]
        return replace(weights, layers=layers, head=lambda: weights.head().outputs(self.vocab))

    def _layer(self, read: Callable[[], LayerWeights]) -> LayerWeights:
        """The ranks' outputs of O and down are added up, so one rank alone holds the biases of these."""
        layer = read()
        o, down = layer.o.inputs(self.o, self.head_dim), layer.down.inputs(self.down, self.inner_unit)
        if self.rank > 0:
            o, down = _without_bias(o), _without_bias(down)
        qkv, gate_up = layer.qkv.outputs(self.qkv), layer.gate_up.outputs(self.gate_up)
        return replace(layer, qkv=qkv, o=o, gate_up=gate_up, down=down)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _spread(heads: list[int], width: int) -> Tensor:
    """The rows of whole heads."""
    first = torch.tensor(heads).unsqueeze(1)
    return torch.where(first < 0, -1, first * width + torch.arange(width)).flatten()


def _after(count: int, rows: Tensor) -> Tensor:
    """The same rows of a matrix that stands below `count` others."""
    return torch.where(rows < 0, -1, rows + count)


def _deal(count: int, unit: int, rank: int, size: int) -> Tensor:
    """This rank's of `count` rows, dealt in equal runs of whole units."""
    share = unit * _ceil(_ceil(count, unit), size)
    rows = torch.arange(rank * share, (rank + 1) * share)
    return torch.where(rows < count, rows, -1)


def _without_bias(weight: Any) -> Weight:
    """Any of the classes of weights, which are dataclasses."""
    return replace(weight, bias=None)
