"""Granite, dense: layers of Llama, with multipliers of embeddings, residuals, attention scores and logits."""

from __future__ import annotations

from dataclasses import replace

from swiftspec.file_io import Fields
from swiftspec.model.architectures.decoder import decoder_spec, refuse_sliding_windows
from swiftspec.model.spec import ModelSpec

LEAST, MOST = 1e-6, 1e6  # of a multiplier


def granite_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a GraniteForCausalLM."""
    refuse_sliding_windows(fields)
    embedding, residual, attention, logits = (
        fields.number(name, 1.0, ge=LEAST, le=MOST)
        for name in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    )
    bias = fields.boolean("attention_bias")
    spec = decoder_spec(fields, qkv_bias=bias, o_bias=bias, mlp_bias=fields.boolean("mlp_bias"))
    layers = (
        replace(layer, mixer=replace(layer.attention, scale=attention), residual_multiplier=residual)
        for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers), embedding_multiplier=embedding, logit_multiplier=1 / logits)
