"""The shape of a model: what config_json.py makes of a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: `theta`, and how the frequencies are stretched beyond the trained length."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # this and the next two: llama3 only
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Llama or Qwen2 model."""

    family: Literal["llama", "qwen2"]
    vocab_size: int  # rows of the embedding; may be more than the tokenizer's
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
    dtype: str  # as torch names it
    quantization: Mapping[str, Any]  # `quantization_config` as it stands (formats/); empty where the weights are dense
    eos_token_ids: tuple[int, ...]
