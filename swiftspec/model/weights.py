"""Model weights as read from disk. A linear layer computes y = x W^T + b, where W is [N, K].

Letters: N outputs, K inputs, D the hidden size, H query heads, G key-value heads, hd the head size, I the size of the
MLP, V the rows of the LM head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Weight(Protocol):
    """Matrix of a linear layer, dense or quantised (formats/), which can be sharded over a group."""

    @property
    def bias(self) -> Tensor | None: ...  # [N]
    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The matrix [N, K] in `dtype`."""
        ...

    # Function from x to y, if the format defines its own arithmetic; None: compute with the dense matrix.
    def product(self, device: torch.device | str) -> Callable[[Tensor], Tensor] | None: ...

    def outputs(self, index: Tensor) -> Weight:
        """The rows `index` [n] int64 of matrix and bias. An index of -1 gives a row of zeros."""
        ...

    def inputs(self, index: Tensor, run: int) -> Weight:
        """The columns `index` [k] int64, which consist of aligned runs of length `run`. -1 gives a column of zeros."""
        ...

    def stack(self, others: Sequence[Any], bias: Tensor | None) -> Weight:
        """One matrix with the outputs of this one, followed by those of `others`, which have the same class."""
        ...


def select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """x.index_select(dim, index), with zeros where the index is -1. A contiguous range is returned as a view."""
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
    """Concatenates `parts` to one matrix that computes all of them on the same input. All or none have a bias.

    If only some of them are dense in the checkpoint, the result is dense.
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
    """Weights of one layer."""

    input_norm: Tensor  # [D]
    qkv: Weight  # [(H + 2G) hd, D]
    o: Weight  # [D, H hd]
    post_norm: Tensor  # [D]
    gate_up: Weight  # [2I, D]
    down: Weight  # [D, I]


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Weights of a whole model. Callables read or create their weights when called; layers are called in order."""

    embedding: Tensor  # [vocab, D]
    layers: Sequence[Callable[[], LayerWeights]]
    norm: Tensor  # [D]
    head: Callable[[], Weight]  # [V, D]
