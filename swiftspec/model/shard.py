"""Sharding of a model over a group of any number of ranks (paper section 4, "arbitrary tensor parallelism").

All ranks have the same local shape: dimensions that the number of ranks does not divide are padded with zeros, which
contribute nothing.
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
from swiftspec.model.spec import AttentionSpec, GatedDeltaSpec, LayerSpec
from swiftspec.model.weights import DeltaWeights, LayerWeights, ModelWeights, Weight, select

INNER_UNIT = 16  # kernels require a projection's inputs to be a multiple of this
EIGHT = 8  # int4 weights are packed in groups of eight outputs


@dataclass(frozen=True, slots=True)
class HeadPartition:
    """Division of the attention heads over ranks. The query heads of each key-value head are divided into units of
    `width` heads, and each rank gets `per_rank` units.

    A unit becomes one local key-value head with `width` query heads. If several units belong to the same key-value
    head, each has a copy of it.
    """

    width: int  # query heads per unit
    per_rank: int  # units per rank

    @staticmethod
    def of(heads: int, kv_heads: int, size: int) -> HeadPartition:
        """Returns the division over `size` ranks with the fewest weights per rank; ties go to the wider units.

        A unit has 2 * width + 2 heads of weights: `width` each in Q and O, one each in K and V.
        """
        group = heads // kv_heads

        def per_rank(width: int) -> int:
            return _ceil(kv_heads * _ceil(group, width), size)

        width = min(range(group, 0, -1), key=lambda width: (2 * width + 2) * per_rank(width))
        return HeadPartition(width, per_rank(width))

    def heads_of(self, rank: int, heads: int, kv_heads: int) -> tuple[list[int], list[int]]:
        """Returns the indices of a rank's query heads [per_rank * width] and key-value heads [per_rank] in the model;
        -1 marks padding. `heads`, `kv_heads`: numbers of heads of the model."""
        group = heads // kv_heads
        units = _ceil(group, self.width)  # units per key-value head
        q: list[int] = []
        kv: list[int] = []
        for unit in range(rank * self.per_rank, (rank + 1) * self.per_rank):
            owner, part = divmod(unit, units)
            kv.append(owner if owner < kv_heads else -1)
            members = range(part * self.width, (part + 1) * self.width)
            q += [owner * group + member if owner < kv_heads and member < group else -1 for member in members]
        return q, kv


@dataclass(frozen=True, slots=True)
class LayerShard:
    """One rank's shard of a layer: for each matrix the indices (int64) of its rows or columns in the whole matrix; -1
    marks zero padding.

    The columns of a padding query head in O and of a padding row of the MLP in `down` are zero, so both contribute
    nothing.
    """

    num_heads: int  # query heads of this rank, including padding; of a delta layer, value heads
    kv_heads: int  # of a delta layer, key heads
    head_dim: int  # of a delta layer, of the value heads
    inner_unit: int  # `down` consists of aligned runs of this many columns
    qkv: Tensor  # rows
    o: Tensor  # columns: [num_heads * head_dim], in aligned runs of head_dim
    gate_up: Tensor  # rows, of a mixture those of all experts
    down: Tensor  # columns, of a mixture those of each expert
    q_heads: Tensor  # [num_heads], indices of the heads
    k_heads: Tensor  # [kv_heads]
    counted: Tensor  # [kv_heads] bool, the key heads of which no earlier rank or unit has a copy
    conv: Tensor | None = None  # [conv_size], channels of the convolution of a delta layer; None: attention
    shared_gate_up: Tensor | None = None  # rows of the shared expert; None: there is none
    shared_down: Tensor | None = None  # columns of it

    @staticmethod
    def of(layer: LayerSpec, unit: int, rank: int, size: int) -> LayerShard:
        """Returns the shard of `rank`. `unit`: see `inner_unit`. Raises UserError if the heads of a delta layer cannot
        be divided equally."""
        inner, experts = layer.mlp.intermediate_size, layer.mlp.experts
        one, columns = _mlp_shard(inner, unit, rank, size)
        gate_up = torch.cat([_after(2 * inner * expert, one) for expert in range(layer.mlp.num_experts)])
        mlp: dict[str, Any] = {"inner_unit": unit, "gate_up": gate_up, "down": columns}
        if experts is not None and experts.shared_intermediate_size:
            shared = _mlp_shard(experts.shared_intermediate_size, unit, rank, size)
            mlp |= zip(("shared_gate_up", "shared_down"), shared, strict=True)
        if isinstance(layer.mixer, GatedDeltaSpec):
            return LayerShard(**mlp, **_delta_shard(layer.mixer, rank, size))
        return LayerShard(**mlp, **_attention_shard(layer.mixer, rank, size))

    def cut(self, layer: LayerWeights, *, first: bool) -> LayerWeights:
        """Cuts a layer. The ranks' outputs of O and down are summed, so only the first rank keeps their biases."""
        o, down = layer.o.inputs(self.o, self.head_dim), layer.down.inputs(self.down, self.inner_unit)
        if not first:
            o, down = _without_bias(o), _without_bias(down)
        qkv, gate_up = layer.qkv.outputs(self.qkv), layer.gate_up.outputs(self.gate_up)
        norms = {"q_norm": (layer.q_norm, self.q_heads), "k_norm": (layer.k_norm, self.k_heads)}
        own: dict[str, Any] = {
            name: select(norm, 0, heads)
            for name, (norm, heads) in norms.items()
            if norm is not None and norm.shape[0] > 1
        }
        if layer.delta is not None:
            own["delta"] = self._cut_delta(layer.delta)
        if layer.sinks is not None:
            own["sinks"] = select(layer.sinks, 0, self.q_heads)
        if self.shared_gate_up is not None and self.shared_down is not None:
            assert layer.shared_gate_up is not None and layer.shared_down is not None
            own["shared_gate_up"] = layer.shared_gate_up.outputs(self.shared_gate_up)
            own["shared_down"] = layer.shared_down.inputs(self.shared_down, self.inner_unit)
        return replace(layer, qkv=qkv, o=o, gate_up=gate_up, down=down, **own)

    def _cut_delta(self, weights: DeltaWeights) -> DeltaWeights:
        assert self.conv is not None
        heads = self.q_heads
        return replace(
            weights,
            rates=weights.rates.outputs(torch.cat((heads, heads + len(weights.decay_log)))),
            conv=select(weights.conv, 0, self.conv),
            decay_log=select(weights.decay_log, 0, heads),
            decay_bias=select(weights.decay_bias, 0, heads),
        )


def _mlp_shard(inner: int, unit: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns a rank's rows of gate and up, and its columns of down, of an MLP with the intermediate size `inner`."""
    columns = _partition_rows(inner, unit, rank, size)
    return torch.cat((columns, _after(inner, columns))), columns


def _attention_shard(mixer: AttentionSpec, rank: int, size: int) -> dict[str, Any]:
    """Returns the fields of a `LayerShard` that belong to attention."""
    heads, kv_heads, width = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    cut = HeadPartition.of(heads, kv_heads, size)
    q_heads, own_kv_heads = cut.heads_of(rank, heads, kv_heads)
    q, kv = _expand_head_rows(q_heads, width), _expand_head_rows(own_kv_heads, width)
    earlier = [head for before in range(rank) for head in cut.heads_of(before, heads, kv_heads)[1]]
    everything = [*earlier, *own_kv_heads]
    counted = [head >= 0 and head not in everything[: len(earlier) + i] for i, head in enumerate(own_kv_heads)]
    parts = [q] if mixer.shares_kv else [q, _after(heads * width, kv), _after((heads + kv_heads) * width, kv)]
    if mixer.output_gate:
        parts.append(_after(mixer.qkv_size, q))
    return {
        "num_heads": len(q_heads),
        "kv_heads": len(own_kv_heads),
        "head_dim": width,
        "qkv": torch.cat(parts),
        "o": q,
        "q_heads": torch.tensor(q_heads),
        "k_heads": torch.tensor(own_kv_heads),
        "counted": torch.tensor(counted),
    }


def _delta_shard(mixer: GatedDeltaSpec, rank: int, size: int) -> dict[str, Any]:
    """Returns the fields of a `LayerShard` that belong to a delta layer: an equal part of the key heads with their
    value heads."""
    if mixer.num_k_heads % size:
        raise UserError(
            f"the {mixer.num_k_heads} key heads of the delta layers cannot be sharded over {size} ranks; use a number"
            " of ranks that divides them"
        )
    k_heads, v_heads = (
        torch.arange(count // size) + rank * (count // size) for count in (mixer.num_k_heads, mixer.num_v_heads)
    )
    keys, values = (
        _expand_head_rows(k_heads.tolist(), mixer.k_head_dim),
        _expand_head_rows(v_heads.tolist(), mixer.v_head_dim),
    )
    conv = torch.cat((keys, keys + mixer.k_size, values + 2 * mixer.k_size))
    return {
        "num_heads": len(v_heads),
        "kv_heads": len(k_heads),
        "head_dim": mixer.v_head_dim,
        "qkv": torch.cat((conv, values + mixer.conv_size)),
        "o": values,
        "q_heads": v_heads,
        "k_heads": k_heads,
        "counted": torch.ones(len(k_heads), dtype=torch.bool),
        "conv": conv,
    }


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's shard of a model."""

    rank: int
    size: int
    layers: tuple[LayerShard, ...]
    vocab: Tensor  # rows of the LM head (int64), following those of the previous rank; -1 marks zero padding

    @staticmethod
    def of(config: ModelConfig, rank: int, size: int) -> Shard:
        """Returns the shard of `rank`. Raises UserError if the model cannot be divided over `size` ranks."""
        layout = format_of(config)
        unit = INNER_UNIT if layout is None else layout.group_size
        made: dict[LayerSpec, LayerShard] = {}
        for layer in dict.fromkeys(config.spec.layers):
            heads = layer.mixer.num_heads if isinstance(layer.mixer, AttentionSpec) else size
            if size > heads:
                raise UserError(f"{heads} query heads cannot be sharded over {size} ranks; use at most {heads} ranks")
            part = made[layer] = LayerShard.of(layer, unit, rank, size)
            widths = [part.head_dim, *([layer.mixer.k_head_dim] if isinstance(layer.mixer, GatedDeltaSpec) else [])]
            width = next((width for width in widths if width % EIGHT), None)
            if size > 1 and layout is not None and width is not None:
                raise UserError(f"sharded int4 weights need a head dimension divisible by 8, not {width}; use one rank")
        return Shard(
            rank=rank,
            size=size,
            layers=tuple(made[layer] for layer in config.spec.layers),
            vocab=_partition_rows(config.spec.vocab_size, EIGHT, rank, size),
        )

    @property
    def head_rows(self) -> int:
        """Number of rows of this rank's LM head, including padding."""
        return len(self.vocab)

    def cut(self, weights: ModelWeights) -> ModelWeights:
        """Returns this rank's shard of `weights`. The embedding and the norms, also those of a head, are complete on
        every rank, except norms with weights for each head."""
        layers = [partial(self.cut_layer, index, read) for index, read in enumerate(weights.layers)]
        return replace(weights, layers=layers, head=lambda: weights.head().outputs(self.vocab))

    def cut_layer(self, index: int, read: Callable[[], LayerWeights]) -> LayerWeights:
        """Reads a layer by `read` and returns this rank's shard of it."""
        return self.layers[index].cut(read(), first=self.rank == 0)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _expand_head_rows(heads: list[int], width: int) -> Tensor:
    """Returns the row indices of `heads`, each of `width` rows; -1 for the rows of a head -1."""
    first = torch.tensor(heads).unsqueeze(1)
    return torch.where(first < 0, -1, first * width + torch.arange(width)).flatten()


def _after(count: int, rows: Tensor) -> Tensor:
    """Returns the indices of `rows` after the matrix is stacked below `count` other rows; -1 stays -1."""
    return torch.where(rows < 0, -1, rows + count)


def _partition_rows(count: int, unit: int, rank: int, size: int) -> Tensor:
    """Returns the indices of this rank's rows if `count` rows are divided over `size` ranks into equal runs of whole
    units of `unit` rows; -1 marks padding."""
    share = unit * _ceil(_ceil(count, unit), size)
    rows = torch.arange(rank * share, (rank + 1) * share)
    return torch.where(rows < count, rows, -1)


def _without_bias(weight: Any) -> Weight:
    """Returns `weight`, which may be of any class, without its bias."""
    return replace(weight, bias=None)
