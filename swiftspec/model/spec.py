"""Model spec: what a decoder is made of, as data. Each variation of a model family is a field, and no other code knows
families; architectures/ builds the spec of each family from its config.json.

A code path that cannot honour a field refuses a model by it (`check_supported` of a backend, tools/width_expand).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swiftspec.errors import UserError


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (RoPE): base `theta`, and the frequency scaling for contexts beyond the trained
    length."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # this field and the next two are for llama3 only
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Causal attention with RoPE, as the token mixer of a layer. Query heads share key-value heads in equal groups
    (GQA)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    qkv_bias: bool = False
    o_bias: bool = False
    # RMSNorm of each query head and each key head before RoPE; the weights [head_dim] are shared by all heads
    qk_norm: bool = False

    @property
    def q_size(self) -> int:
        """Number of elements of a token's queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Number of elements of a token's keys, and of its values."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """Dense SwiGLU MLP: down(SiLU(gate(x)) * up(x))."""

    intermediate_size: int
    bias: bool = False  # of all three projections


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: a token mixer and an MLP, each after an RMSNorm and with a residual connection."""

    mixer: AttentionSpec
    mlp: MlpSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder: embedding, layers, final RMSNorm and LM head."""

    vocab_size: int  # rows of the embedding; may exceed the tokenizer's vocabulary
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float  # of every RMSNorm
    tie_word_embeddings: bool  # the embedding is also the LM head

    @property
    def layer(self) -> LayerSpec:
        """The spec of every layer. Raises UserError if the layers differ: the KV cache, the RoPE tables and the shards
        have one shape for all layers."""
        first = self.layers[0]
        if any(layer != first for layer in self.layers):
            raise UserError("models whose layers differ in shape are not supported")
        return first
