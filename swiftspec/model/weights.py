"""A model's weights as they are read from disk. A linear layer computes y = x W^T + b, and W is [N, K].

Letters: N outputs, K inputs, D the hidden size, H query heads, G key-value heads, hd the width of a head, I the MLP's
width, V the rows of the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Weight(Protocol):
    """The matrix of a linear layer, dense or quantised (formats/), which can be cut for a group of ranks."""

    @property
    def bias(self) -> Tensor | None: ...  # [N]
    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The matrix [N, K] in `dtype`."""
        ...

    # y of x where the matrix has an arithmetic of its own; None where that is its dense form's
    def product(self, device: torch.device | str) -> Callable[[Tensor], Tensor] | None: ...

    def outputs(self, index: Tensor) -> Weight:
        """The rows `index` [n] int64 of matrix and bias. An index of -1 gives a row of zeros."""
        ...

    def inputs(self, index: Tensor, run: int) -> Weight:
        """The columns `index` [k] int64, which come in aligned runs of `run`. -1 gives a column of zeros."""
        ...

    def stack(self, others: Sequence[Any], bias: Tensor | None) -> Weight:
        """One matrix whose outputs are those of this one and then those of `others`, which are of the same class."""
        ...


def select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """x.index_select(dim, index), with zeros where the index is -1. A run of x is a view of it."""
    start, count = int(index[0]), len(index)
    if start >= 0 and torch.equal(index, torch.arange(start, start + count)):
        return x.narrow(dim, start, count)
    chosen = x.index_select(dim, index.clamp_min(0))
    missing = (index < 0).nonzero().squeeze(1)
    return chosen.index_fill_(dim, missing, 0) if missing.numel() else chosen


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A floating-point matrix."""

    weight: Tensor  # [N, K]
    bias: Tensor | None = None  # [N]

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
    """One matrix that computes all of `parts` on the same input, one after the other. All or none have a bias.

    Where a checkpoint has left only some of them dense, the whole becomes dense.
    """
    biases = [part.bias for part in parts if part.bias is not None]
    assert len(biases) in (0, len(parts))
    bias = torch.cat(biases) if biases else None
    if len({type(part) for part in parts}) > 1:
        dtype = next(part.weight.dtype for part in parts if isinstance(part, DenseWeight))
        return DenseWeight(torch.cat([part.dequantize(dtype) for part in parts]), bias)
    return parts[0].stack(parts[1:], bias)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer."""

    input_norm: Tensor  # [D]
    qkv: Weight  # [(H + 2G) hd, D]
    o: Weight  # [D, H hd]
    post_norm: Tensor  # [D]
    gate_up: Weight  # [2I, D]
    down: Weight  # [D, I]


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A whole model. What is a call is read, or made, when it is called: the layers in their order."""

    embedding: Tensor  # [vocab, D]
    layers: Sequence[Callable[[], LayerWeights]]
    norm: Tensor  # [D]
    head: Callable[[], Weight]  # [V, D]
