"""A model with packed weights, and the protocol of a backend that runs its forward in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from swiftspec.model.batch import Batch, ForwardOutput
from swiftspec.model.tensor_parallel import TensorParallelGroup


@dataclass(frozen=True, slots=True)
class PackedMlp:
    """A dense SwiGLU MLP with packed weights."""

    gate_up: Any
    down: Any


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One layer with packed weights: two norms, the projections of attention, the MLP."""

    input_norm: Any
    qkv: Any
    o: Any
    post_norm: Any
    mlp: PackedMlp
    qk_norm: Any = None  # norm of the query and key heads, weight [num_heads + kv_heads, head_dim]; None: no norm


@dataclass(frozen=True, slots=True)
class PackedModel:
    """Packed weights and RoPE tables of a model, or of one rank's shard."""

    embedding: Tensor  # [vocab, hidden]
    layers: Sequence[PackedLayer]
    norm: Any
    head: Any
    cos: Tensor  # [positions, head_dim]
    sin: Tensor
    num_heads: int
    kv_heads: int
    group: TensorParallelGroup | None  # all-reduces the outputs of attention and MLP; None: the model is not sharded
    hidden_layers: tuple[int, ...] = ()  # layers whose hidden states a forward returns, ascending


class KVTensors(Protocol):
    """Keys and values of the attention layers: `k` and `v` are [layers, sequences, kv_heads, capacity, head_dim]. A
    forward writes the slots of its rows."""

    k: Tensor
    v: Tensor


class LayerCaches(Protocol):
    """Cache of a model, by kind of layer."""

    @property
    def kv(self) -> KVTensors: ...


class FusedModel(Protocol):
    """A model whose forward is one native call."""

    def forward(self, batch: Batch, cache: Any, head: bool, /) -> ForwardOutput:
        """Runs a forward, without the LM head if `head` is false, and writes its keys and values to `cache`."""
        ...
