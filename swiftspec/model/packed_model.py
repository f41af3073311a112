"""Model with packed weights, and the interface for running all of it in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from swiftspec.model.batch import Batch
from swiftspec.model.tensor_parallel import TensorParallelGroup


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One layer with packed weights: two norms, four projections."""

    input_norm: Any
    qkv: Any
    o: Any
    post_norm: Any
    gate_up: Any
    down: Any


@dataclass(frozen=True, slots=True)
class PackedModel:
    """All weights that a forward reads, of a model or of one rank's shard."""

    embedding: Tensor  # [vocab, D]
    layers: Sequence[PackedLayer]
    norm: Any
    head: Any
    cos: Tensor  # [positions, hd]
    sin: Tensor
    num_heads: int
    kv_heads: int
    group: TensorParallelGroup | None  # the ranks that all-reduce the outputs of O and down


class Cache(Protocol):
    """Keys and values, both [layers, S, G, capacity, hd]. The forward writes the slots of its rows."""

    k: Tensor
    v: Tensor


class FusedModel(Protocol):
    """A whole model as one native call."""

    def forward(self, batch: Batch, cache: Any, head: bool, /) -> Tensor | None:
        """Writes the rows' keys and values into the cache. Returns logits [n, V], or None without the head."""
        ...
