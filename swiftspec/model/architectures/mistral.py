"""Mistral and Ministral 3: layers of Llama without biases, with a sliding window in early models; Ministral 3 scales
its queries by position."""

from __future__ import annotations

from dataclasses import replace

from swiftspec.file_io import Fields
from swiftspec.model.architectures.decoder import (
    FULL,
    SLIDING,
    decoder_spec,
    layer_count,
    layer_kinds,
    replace_mixers,
    sliding_window,
    windows_of,
)
from swiftspec.model.spec import ModelSpec

MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072}
MINISTRAL3_DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144}


def mistral_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a MistralForCausalLM."""
    return decoder_spec(fields, windows=[sliding_window(fields)] * layer_count(fields))


def ministral_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a MinistralForCausalLM, whose layers have a sliding window or not."""
    usual = [FULL if sliding_window(fields) is None else SLIDING] * layer_count(fields)
    return decoder_spec(fields, windows=windows_of(fields, layer_kinds(fields, usual)))


def ministral3_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a Ministral3ForCausalLM."""
    spec = mistral_spec(fields)
    beta = fields.object("rope_parameters").number("llama_4_scaling_beta", 0.0, ge=0.0, le=1e3)
    mixers = (replace(layer.attention, query_scale_beta=beta) for layer in spec.layers)
    return replace_mixers(spec, dict(enumerate(mixers)))
