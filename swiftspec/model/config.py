"""Configuration of a model, as config_json.py reads it from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (RoPE): base `theta`, and the frequency scaling for contexts beyond the trained
    length."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # this field and the next two are for llama3 only
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Configuration of a Llama or Qwen2 model."""

    family: Literal["llama", "qwen2"]
    vocab_size: int  # rows of the embedding; may exceed the tokenizer's vocabulary
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    dtype: str  # name of a torch dtype
    quantization: Mapping[str, Any]  # `quantization_config` of config.json, empty if all weights are dense
    eos_token_ids: tuple[int, ...]
