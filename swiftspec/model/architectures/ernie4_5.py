"""Ernie 4.5, dense: layers of Llama with RoPE of neighbouring elements."""

from __future__ import annotations

from dataclasses import replace

from swiftspec.file_io import Fields
from swiftspec.model.architectures.decoder import decoder_spec, refuse_sliding_windows, replace_mixers
from swiftspec.model.spec import ModelSpec

DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}


def ernie4_5_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of an Ernie4_5ForCausalLM."""
    refuse_sliding_windows(fields)
    bias = fields.boolean("use_bias")
    spec = decoder_spec(fields, qkv_bias=bias, o_bias=bias, mlp_bias=bias)
    mixers = (replace(layer.attention, rope=replace(layer.attention.rope, interleaved=True)) for layer in spec.layers)
    return replace_mixers(spec, dict(enumerate(mixers)))
