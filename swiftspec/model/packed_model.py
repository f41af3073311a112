"""A model with packed weights, and the protocol of a backend that runs its forward in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from swiftspec.model.batch import Batch, ForwardOutput
from swiftspec.model.spec import Activation, ExpertsSpec
from swiftspec.model.tensor_parallel import TensorParallelGroup


@dataclass(frozen=True, slots=True)
class PackedMlp:
    """A dense gated MLP with packed weights."""

    gate_up: Any
    down: Any
    activation: Activation = "silu"


@dataclass(frozen=True, slots=True)
class PackedMixture:
    """A mixture of experts with packed weights; `swiftspec.model.spec.ExpertsSpec` documents it."""

    router: Any  # the last output is the gate of the shared expert, if there is one
    gate_up: Any  # of all experts but the shared one
    down: Any
    experts: ExpertsSpec
    activation: Activation = "silu"
    shared: PackedMlp | None = None  # the shared expert
    # [num_experts, outputs], of operators whose projections do not contain them
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    correction: Tensor | None = None  # [num_experts] float32, or float64 in a float64 model; see `SigmoidRouting`


@dataclass(frozen=True, slots=True)
class PackedDelta:
    """Weights of a delta layer besides its two projections. Tensors are float32, or float64 in a float64 model."""

    rates: Any  # projection to the rates of update and decay, [2 * v_heads]
    conv: Tensor  # [conv_width, conv_size]
    decay_factor: Tensor  # [v_heads], -exp(A_log): the decay is this times softplus(rate + decay_bias)
    decay_bias: Tensor  # [v_heads]
    norm: Any  # RMSNorm of each head of the output, [v_head_dim]


@dataclass(frozen=True, slots=True)
class PackedPerLayer:
    """What computes the per-layer embeddings of a model, with packed weights; `ModelSpec.per_layer_size` defines
    them."""

    table: Tensor  # [vocab, layers * per_layer_size]
    multiplier: float  # of the table, rounded to the dtype of the model
    projection: Any
    norm: Any  # [per_layer_size], whose epsilon includes the factor of the projection


@dataclass(frozen=True, slots=True)
class PackedPerLayerPart:
    """What applies the per-layer embeddings in a layer, with packed weights. It is whole on every rank."""

    gate: Any
    projection: Any
    norm: Any
    activation: Activation


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One layer with packed weights: norms, the projections of the mixer, the MLP. A norm is None if the layer does not
    have it."""

    input_norm: Any
    qkv: Any
    o: Any
    mlp_norm: Any  # before the MLP
    mlp: PackedMlp | PackedMixture
    # norm of the query and key heads, weight [num_heads + kv_heads, head_dim]; with a norm of the value heads, too,
    # weight [num_heads + 2 * kv_heads, head_dim]; of a shared KV layer [num_heads, head_dim]
    qk_norm: Any = None
    mixer_output_norm: Any = None
    mlp_output_norm: Any = None
    residual_multiplier: float = 1.0
    output_scale: Tensor | None = None  # [1], in the dtype of the model
    attention: int = 0  # index in `PackedModel.attention`
    # index of the layer in its KV cache, or in the delta cache; of a shared KV layer that of the layer whose keys and
    # values it shares
    cache_layer: int = 0
    # the mixer is a delta layer, `qkv` its projection to queries, keys, values and gate, and `o` that of its output
    delta: PackedDelta | None = None
    sinks: Tensor | None = None  # [num_heads] float32, or float64 in a float64 model; None: no attention sinks
    per_layer: PackedPerLayerPart | None = None  # None: the model has no per-layer embeddings


@dataclass(frozen=True, slots=True, eq=False)
class ProjectionNorm:
    """RMSNorm over all query heads together and over all key heads together, of a model or of one rank's shard."""

    q_size: int  # elements of all query heads of the whole model
    k_size: int
    counted: Tensor | None = None  # [kv_heads] bool, key heads of which this rank has the first copy; None: all
    reduce: Callable[[Tensor], Tensor] | None = None  # sums over the ranks of a group


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOptions:
    """Variations of attention, which all layers of one kind share. `swiftspec.model.spec.AttentionSpec` documents
    them."""

    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    query_scale: Tensor | None = None  # [positions] float32, factor of a query at a position
    projection_norm: ProjectionNorm | None = None  # qk_norm is a norm of whole projections
    norm_after_rope: bool | None = None  # qk_norm comes after RoPE; None: before

    @property
    def in_use(self) -> tuple[str, ...]:
        """Names of the options that differ from their defaults."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) is not None)


PLAIN_ATTENTION = AttentionOptions()


@dataclass(frozen=True, slots=True, eq=False)
class PackedAttention:
    """RoPE tables, head counts and options of the attention layers of one kind, for a model or one rank's shard."""

    cos: Tensor  # [positions, head_dim]
    sin: Tensor
    num_heads: int
    kv_heads: int
    options: AttentionOptions = PLAIN_ATTENTION
    cache: int = 0  # index of its KV cache in `LayerCaches.kinds`
    gate_size: int = 0  # elements of the gate of the output, which follow the values in the product of `qkv`


class DeltaShape(NamedTuple):
    """Sizes of a model's delta layers, or of one rank's shard of them."""

    layers: int
    k_heads: int
    v_heads: int
    k_head_dim: int
    v_head_dim: int
    conv_size: int  # channels of the convolution
    conv_width: int  # positions that the convolution reads, its own included


@dataclass(frozen=True, slots=True)
class PackedModel:
    """Packed weights and RoPE tables of a model, or of one rank's shard."""

    embedding: Tensor  # [vocab, hidden]
    layers: Sequence[PackedLayer]
    norm: Any
    head: Any
    attention: Sequence[PackedAttention]  # by kind of attention layer
    group: TensorParallelGroup | None  # all-reduces the outputs of attention and MLP; None: the model is not sharded
    hidden_layers: tuple[int, ...] = ()  # layers whose hidden states a forward returns, ascending
    embedding_multiplier: float = 1.0  # rounded to the dtype of the model
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None
    delta: DeltaShape | None = None  # None: no layer is a delta layer
    per_layer: PackedPerLayer | None = None  # None: the model has no per-layer embeddings


class KVTensors(Protocol):
    """Keys and values of attention layers of one shape: `k` and `v` are [layers, sequences, kv_heads, capacity,
    head_dim]. A forward writes the slots of its rows."""

    k: Tensor
    v: Tensor


class DeltaTensors(Protocol):
    """States of the delta layers; `swiftspec.cache.delta.DeltaCache` documents them. A forward writes the slots of its
    rows."""

    state: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor
    inputs: Tensor
    folded: NDArray[np.int64]
    folded_on_device: Tensor

    @property
    def conv_width(self) -> int: ...


class LayerCaches(Protocol):
    """Cache of a model, by kind of layer. `kv`: the first of the kinds. `delta`: None if no layer is a delta layer."""

    @property
    def kv(self) -> KVTensors: ...
    @property
    def kinds(self) -> Sequence[Any]: ...
    @property
    def delta(self) -> Any: ...


class FusedModel(Protocol):
    """A model whose forward is one native call."""

    def forward(self, batch: Batch, cache: LayerCaches, head: bool, /) -> ForwardOutput:
        """Runs a forward, without the LM head if `head` is false, and writes the states of its rows to `cache`."""
        ...
