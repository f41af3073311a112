"""Gemma 3: norms with 1 + weight before and after attention and MLP, norms of heads, GeGLU, scaled embeddings; five of
six layers have a sliding window and a RoPE base of their own."""

from __future__ import annotations

from dataclasses import replace

from swiftspec.errors import UserError
from swiftspec.file_io import Fields
from swiftspec.model.architectures.decoder import (
    FULL,
    SLIDING,
    decoder_spec,
    layer_kinds,
    parse_rope,
    replace_mixers,
    sliding_every,
    windows_of,
)
from swiftspec.model.spec import ModelSpec, RopeSpec
from swiftspec.model.tensor_names import TensorNames

DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
NAMES = TensorNames(mlp_norm="pre_feedforward_layernorm")
GELU = "gelu_pytorch_tanh"


def gemma3_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a Gemma3ForCausalLM."""
    if fields.boolean("use_bidirectional_attention"):
        raise UserError("bidirectional attention (use_bidirectional_attention) is not supported")
    period = fields.integer("sliding_window_pattern", 6, ge=1, le=2**14)
    kinds = layer_kinds(fields, sliding_every(fields, period))
    bias = fields.boolean("attention_bias")
    spec = decoder_spec(
        fields,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        norms="both",
        activation=GELU,
        windows=windows_of(fields, kinds),
    )
    scale = fields.number("query_pre_attn_scalar", ge=1e-3, le=1e6) ** -0.5
    local = RopeSpec(fields.number("rope_local_base_freq", ge=1.0, le=1e15))
    nested = SLIDING in fields.object("rope_parameters").data
    ropes = {
        FULL: parse_rope(fields.data, FULL),
        SLIDING: parse_rope({**fields.data, "rope_theta": local.theta}, SLIDING) if nested else local,
    }
    mixers = (
        replace(layer.attention, rope=ropes[kind], scale=scale) for layer, kind in zip(spec.layers, kinds, strict=True)
    )
    return replace(
        replace_mixers(spec, dict(enumerate(mixers))),
        norm_unit_offset=True,
        embedding_multiplier=spec.hidden_size**0.5,
        logit_softcap=soft_cap_of(fields, "final_logit_softcapping"),
    )


def soft_cap_of(fields: Fields, name: str) -> float | None:
    """Returns the soft cap `name`, or None if it is missing or null."""
    return None if fields.data.get(name) is None else fields.number(name, ge=1e-3, le=1e6)
