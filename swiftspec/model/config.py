"""Configuration of a checkpoint, as config_json.py reads it from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swiftspec.model.spec import ModelSpec
from swiftspec.model.tensor_names import TensorNames


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model and the properties of its checkpoint."""

    spec: ModelSpec
    names: TensorNames
    max_position_embeddings: int
    dtype: str  # name of a torch dtype
    quantization: Mapping[str, Any]  # `quantization_config` of config.json, empty if all weights are dense
    eos_token_ids: tuple[int, ...]  # without those of the tokenizer; see end_tokens.py
