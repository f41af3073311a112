"""Phi-3 and Phi-4: one matrix for queries, keys and values, one for gate and up; partial RoPE, and longrope in models
with long contexts."""

from __future__ import annotations

from swiftspec.file_io import Fields
from swiftspec.model.architectures.decoder import decoder_spec, layer_count, sliding_window
from swiftspec.model.spec import ModelSpec
from swiftspec.model.tensor_names import TensorNames

DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
NAMES = TensorNames(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")


def phi3_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a Phi3ForCausalLM."""
    return decoder_spec(fields, partial_rope=True, windows=[sliding_window(fields)] * layer_count(fields))
