"""Parser of the config.json fields that decoder families share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swiftspec.errors import UserError, truncated_repr
from swiftspec.file_io import Fields
from swiftspec.model.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec

MOST_POSITIONS = 2**31 - 1  # the bounds in this file exceed the values of real models and exclude overflow


def decoder_spec(fields: Fields, *, qkv_bias: bool, o_bias: bool, mlp_bias: bool, qk_norm: bool) -> ModelSpec:
    """Returns the spec of a decoder whose layers are all alike. The keyword arguments are what a family determines;
    see `AttentionSpec` and `MlpSpec`. Raises UserError on unsupported features."""
    activation = fields.string("hidden_act", "silu")
    if activation != "silu":
        raise UserError(f"hidden_act {truncated_repr(activation)} is not supported; only 'silu' is")
    if fields.boolean("use_sliding_window") or "sliding_attention" in fields.strings("layer_types"):
        raise UserError("sliding window attention is not supported")
    hidden = fields.integer("hidden_size", ge=1, le=2**18)
    heads = fields.integer("num_attention_heads", ge=1, le=2**14)
    kv_heads = fields.integer("num_key_value_heads", heads, ge=1, le=2**14)
    head_dim = fields.integer("head_dim", max(hidden // heads, 1), ge=1, le=2**14)
    if heads % kv_heads:
        raise UserError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise UserError(f"head_dim {head_dim} is odd")
    mixer = AttentionSpec(heads, kv_heads, head_dim, parse_rope(fields.data), qkv_bias, o_bias, qk_norm)
    mlp = MlpSpec(fields.integer("intermediate_size", ge=1, le=2**22), mlp_bias)
    return ModelSpec(
        vocab_size=fields.integer("vocab_size", ge=1, le=2**26),
        hidden_size=hidden,
        layers=(LayerSpec(mixer, mlp),) * fields.integer("num_hidden_layers", ge=1, le=2**14),
        norm_eps=fields.number("rms_norm_eps", 1e-6, ge=1e-30, le=1.0),
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
    )


def parse_rope(data: Mapping[str, Any]) -> RopeSpec:
    """Parses `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (transformers 4)."""
    fields = Fields(data)
    newer, older = fields.object("rope_parameters"), fields.object("rope_scaling")
    scaling = newer if newer.data else older
    both = Fields({**data, **scaling.data})
    kind = scaling.string("rope_type", scaling.string("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise UserError(f"RoPE type {truncated_repr(kind)} is not supported; default, linear and llama3 are")
    if both.number("partial_rotary_factor", 1.0, ge=0.0, le=1.0) != 1:
        raise UserError("a partial_rotary_factor other than 1 is not supported")
    theta = both.number("rope_theta", 10000.0, ge=1.0, le=1e15)
    if kind == "default":
        return RopeSpec(theta)
    factor = scaling.number("factor", ge=0.01, le=1e6)
    if kind == "linear":
        return RopeSpec(theta, kind, factor)
    low, high = (scaling.number(f"{end}_freq_factor", ge=1e-3, le=1e6) for end in ("low", "high"))
    if low >= high:
        raise UserError(f"RoPE low_freq_factor {low} must be below high_freq_factor {high}")
    original = scaling.integer("original_max_position_embeddings", ge=1, le=MOST_POSITIONS)
    return RopeSpec(theta, kind, factor, low, high, original)
