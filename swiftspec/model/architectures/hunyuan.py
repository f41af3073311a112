"""Hunyuan, dense: norms of query and key heads after RoPE."""

from __future__ import annotations

from dataclasses import replace

from swiftspec.file_io import Fields
from swiftspec.model.architectures.decoder import decoder_spec, refuse_sliding_windows, replace_mixers
from swiftspec.model.spec import ModelSpec
from swiftspec.model.tensor_names import TensorNames

DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
NAMES = TensorNames(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")


def hunyuan_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a HunYuanDenseV1ForCausalLM."""
    refuse_sliding_windows(fields)
    bias = fields.boolean("attention_bias")
    spec = decoder_spec(_with_scaled_base(fields), qkv_bias=bias, o_bias=bias, qk_norm="head")
    mixers = (replace(layer.attention, norm_after_rope=True) for layer in spec.layers)
    return replace_mixers(spec, dict(enumerate(mixers)))


def _with_scaled_base(fields: Fields) -> Fields:
    """Returns the fields with the default RoPE instead of type "dynamic" with `alpha`, which multiplies the base by
    alpha ** (d / (d - 2)) for heads of d elements, whatever the length of the text."""
    name = "rope_parameters" if fields.data.get("rope_parameters") else "rope_scaling"
    scaling = fields.object(name)
    kind = scaling.string("rope_type", scaling.string("type", "default"))
    if kind != "dynamic" or not scaling.data.get("alpha"):
        return fields
    heads = fields.integer("num_attention_heads", ge=1, le=2**14)
    dim = fields.integer("head_dim", fields.integer("hidden_size", ge=1, le=2**18) // heads, ge=4, le=2**14)
    theta = Fields({**fields.data, **scaling.data}).number("rope_theta", 10000.0, ge=1.0, le=1e9)
    base = theta * scaling.number("alpha", ge=1e-3, le=1e6) ** (dim / (dim - 2))
    plain = {"rope_type": "default", "rope_theta": base}
    return replace(fields, data={**fields.data, "rope_parameters": plain, "rope_scaling": None})
