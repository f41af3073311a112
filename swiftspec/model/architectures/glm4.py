"""GLM-4, dense: biases of queries, keys and values, RoPE of neighbouring elements in half of a head, one matrix for
gate and up. The models of 2025 ("Glm4") have norms after attention and MLP, too."""

from __future__ import annotations

from dataclasses import replace

from swiftspec.file_io import Fields
from swiftspec.model.architectures.decoder import decoder_spec, refuse_sliding_windows, replace_mixers
from swiftspec.model.spec import ModelSpec
from swiftspec.model.tensor_names import TensorNames

DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "max_position_embeddings": 131072,
}
GLM_NAMES = TensorNames(gate_up="mlp.gate_up_proj")
GLM4_NAMES = replace(GLM_NAMES, mixer_output_norm="post_self_attn_layernorm", mlp_output_norm="post_mlp_layernorm")


def glm_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a GlmForCausalLM."""
    refuse_sliding_windows(fields)
    spec = decoder_spec(fields, partial_rope=True, qkv_bias=fields.boolean("attention_bias"))
    mixers = (replace(layer.attention, rope=replace(layer.attention.rope, interleaved=True)) for layer in spec.layers)
    return replace_mixers(spec, dict(enumerate(mixers)))


def glm4_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a Glm4ForCausalLM."""
    spec = glm_spec(fields)
    return replace(spec, layers=tuple(replace(layer, norms="both") for layer in spec.layers))
