"""Gemma 2: layers of Gemma 3 without norms of heads, with soft caps of scores and logits; every other layer has a
sliding window."""

from __future__ import annotations

from dataclasses import replace

from swiftspec.errors import UserError
from swiftspec.file_io import Fields
from swiftspec.model.architectures.decoder import (
    decoder_spec,
    layer_kinds,
    replace_mixers,
    sliding_every,
    windows_of,
)
from swiftspec.model.architectures.gemma3 import GELU, soft_cap_of
from swiftspec.model.spec import ModelSpec

DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "tie_word_embeddings": True,
}


def gemma2_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a Gemma2ForCausalLM."""
    if fields.boolean("use_bidirectional_attention"):
        raise UserError("bidirectional attention (use_bidirectional_attention) is not supported")
    bias, windows = fields.boolean("attention_bias"), windows_of(fields, layer_kinds(fields, sliding_every(fields, 2)))
    fields = replace(fields, data={**fields.data, "hidden_act": None})  # files have GELU there, and mean the next field
    spec = decoder_spec(fields, qkv_bias=bias, o_bias=bias, norms="both", activation=GELU, windows=windows)
    scale = fields.number("query_pre_attn_scalar", ge=1e-3, le=1e6) ** -0.5
    cap = soft_cap_of(fields, "attn_logit_softcapping")
    mixers = (replace(layer.attention, scale=scale, softcap=cap) for layer in spec.layers)
    return replace(
        replace_mixers(spec, dict(enumerate(mixers))),
        norm_unit_offset=True,
        embedding_multiplier=spec.hidden_size**0.5,
        logit_softcap=soft_cap_of(fields, "final_logit_softcapping"),
    )
