"""Model weights as read from disk. A linear layer computes y = x W^T + b, where W is [outputs, inputs]."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor


class Weight(Protocol):
    """Matrix of a linear layer, dense or quantised (formats/), which can be sharded over a group."""

    @property
    def bias(self) -> Tensor | None: ...  # [outputs]
    @property
    def shape(self) -> tuple[int, int]: ...  # (outputs, inputs)
    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix [outputs, inputs] in `dtype`."""
        ...

    def product(self, device: torch.device | str) -> Callable[[Tensor], Tensor] | None:
        """Returns a function from x [rows, inputs] to y [rows, outputs] if the format defines its own arithmetic, and
        None if y is the product with the dense matrix."""
        ...

    def outputs(self, index: Tensor) -> Weight:
        """Returns the weight with only the outputs `index` (int64), in this order: rows of the matrix and elements of
        the bias. An index of -1 gives zeros."""
        ...

    def inputs(self, index: Tensor, run: int) -> Weight:
        """Returns the weight with only the inputs `index` (int64), in this order: columns of the matrix. An index of -1
        gives zeros. `index` consists of runs of `run` consecutive inputs that start at a multiple of `run`, or of runs
        of -1."""
        ...

    def stack(self, others: Sequence[Any], bias: Tensor | None) -> Weight:
        """Returns one weight with the outputs of this one, followed by those of `others`, which are of the same class.
        `bias`: bias of the result."""
        ...


def select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Returns x.index_select(dim, index), with zeros where the index is -1. The result is a view if `index` is a
    contiguous range."""
    start, count = int(index[0]), len(index)
    if start >= 0 and torch.equal(index, torch.arange(start, start + count)):
        return x.narrow(dim, start, count)
    chosen = x.index_select(dim, index.clamp_min(0).to(x.device))
    missing = (index < 0).nonzero().squeeze(1).to(x.device)
    return chosen.index_fill_(dim, missing, 0) if missing.numel() else chosen


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A floating-point matrix."""

    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None = None  # [outputs]

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.weight.shape
        return outputs, inputs

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)

    def product(self, device: torch.device | str) -> None:
        return None

    def outputs(self, index: Tensor) -> DenseWeight:
        bias = None if self.bias is None else select(self.bias, 0, index)
        return DenseWeight(select(self.weight, 0, index), bias)

    def inputs(self, index: Tensor, run: int) -> DenseWeight:
        return DenseWeight(select(self.weight, 1, index), self.bias)

    def stack(self, others: Sequence[DenseWeight], bias: Tensor | None) -> DenseWeight:
        return DenseWeight(torch.cat([self.weight, *(other.weight for other in others)]), bias)


def fuse_weights(parts: Sequence[Weight]) -> Weight:
    """Concatenates the outputs of `parts` to one weight, so that a single product computes all of them. Either all
    parts have a bias or none.

    If some parts are dense and others quantised, the result is dense, in float32 or the dense parts' wider dtype.
    """
    biases = [part.bias for part in parts if part.bias is not None]
    assert len(biases) in (0, len(parts))
    bias = torch.cat(biases) if biases else None
    if len({type(part) for part in parts}) > 1:
        dtype = torch.float32
        for part in parts:
            dtype = torch.promote_types(dtype, part.weight.dtype) if isinstance(part, DenseWeight) else dtype
        return DenseWeight(torch.cat([part.dequantize(dtype) for part in parts]), bias)
    return parts[0].stack(parts[1:], bias)


def split_experts(weight: Weight, count: int) -> Iterator[Weight]:
    """Yields the matrix of each of the `count` experts of a mixture. `weight`: those of all experts, one below the
    other. Copies its tensors at most once, and yields views of them."""
    rows = torch.arange(weight.shape[0])
    whole = weight.outputs(rows)
    yield from (whole.outputs(part) for part in rows.chunk(count))


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Weights of a delta layer besides its two projections, or of one rank's shard of them."""

    rates: Weight  # [2 * v_heads, hidden], rates of update and of decay
    conv: Tensor  # [conv_size, conv_width]
    decay_log: Tensor  # [v_heads], A_log of the checkpoint
    decay_bias: Tensor  # [v_heads]
    norm: Tensor  # [v_head_dim]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer, or of one rank's shard of it. A norm is None if the layer does not have it.

    The fields are one flat table: sharding, quantisation at load and the cache of packed weights choose them by name.
    """

    input_norm: Tensor | None  # [hidden]
    # [(num_heads + 2 * kv_heads) * head_dim, hidden], and num_heads * head_dim further rows with an output gate; of a
    # shared KV layer [num_heads * head_dim, hidden]; of a delta layer [conv_size + v_size, hidden]
    qkv: Weight
    o: Weight  # [hidden, num_heads * head_dim], of a delta layer [hidden, v_size]
    mlp_norm: Tensor | None  # [hidden], before the MLP
    # of a mixture of experts the matrices of all experts but the shared one, one below the other
    gate_up: Weight  # [2 * intermediate_size, hidden]
    down: Weight  # [hidden, intermediate_size]
    # of queries and keys: [1, head_dim] if all heads share the weights, otherwise [num_heads or kv_heads, head_dim]
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    v_norm: Tensor | None = None  # [1, head_dim]
    mixer_output_norm: Tensor | None = None  # [hidden]
    mlp_output_norm: Tensor | None = None  # [hidden]
    output_scale: Tensor | None = None  # [1]
    router: Weight | None = None  # [num_experts, hidden], and one more row with a shared expert, the gate of it
    correction: Tensor | None = None  # [num_experts], of sigmoid scores; see `SigmoidRouting`
    shared_gate_up: Weight | None = None  # [2 * shared_intermediate_size, hidden]
    shared_down: Weight | None = None  # [hidden, shared_intermediate_size]
    delta: DeltaWeights | None = None
    sinks: Tensor | None = None  # [num_heads]
    per_layer_gate: Weight | None = None  # [per_layer_size, hidden]; None: the model has no per-layer embeddings
    per_layer_projection: Weight | None = None  # [hidden, per_layer_size]
    per_layer_norm: Tensor | None = None  # [hidden]


@dataclass(frozen=True, slots=True)
class PerLayerWeights:
    """Weights from which a model computes its per-layer embeddings; `ModelSpec.per_layer_size` defines these."""

    table: Tensor  # [vocab, layers * per_layer_size]
    projection: Weight  # [layers * per_layer_size, hidden]
    norm: Tensor  # [per_layer_size]


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Weights of a whole model, or of one rank's shard. The callables read their weights when they are called; those of
    `layers` are called in order."""

    embedding: Tensor  # [vocab, hidden]
    layers: Sequence[Callable[[], LayerWeights]]
    norm: Tensor  # [hidden]
    head: Callable[[], Weight]  # [vocab, hidden]; in a shard, this rank's rows
    per_layer: PerLayerWeights | None = None  # whole on every rank

    def with_vocab_rows(self, rows: int) -> ModelWeights:
        """Returns the weights of a whole model with `rows` rows in embedding and LM head: those of tokens that it does
        not have are zeros."""
        if rows == len(self.embedding):
            return self
        index = torch.arange(rows)
        index[len(self.embedding) :] = -1
        per_layer = self.per_layer
        if per_layer is not None:
            per_layer = replace(per_layer, table=select(per_layer.table, 0, index))
        embedding, head = select(self.embedding, 0, index), lambda: self.head().outputs(index)
        return replace(self, embedding=embedding, head=head, per_layer=per_layer)
