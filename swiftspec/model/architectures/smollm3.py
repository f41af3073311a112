"""SmolLM3: layers of Llama, of which every fourth has no position embedding (NoPE)."""

from __future__ import annotations

from dataclasses import replace

from swiftspec.errors import UserError
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

DEFAULTS = {
    "num_key_value_heads": 4,
    "rope_theta": 2e6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}


def smollm3_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a SmolLM3ForCausalLM."""
    count, bias = layer_count(fields), fields.boolean("attention_bias")
    period = fields.integer("no_rope_layer_interval", 4, ge=1, le=2**14)
    rotated = fields.integers("no_rope_layers", ge=0, le=1) or [int((i + 1) % period != 0) for i in range(count)]
    if len(rotated) < count:
        raise UserError(f"no_rope_layers has {len(rotated)} entries for {count} layers")
    windowed = fields.boolean("use_sliding_window") and sliding_window(fields) is not None
    kinds = layer_kinds(fields, [FULL if rope or not windowed else SLIDING for rope in rotated[:count]])
    windows = windows_of(fields, kinds) if windowed else [None] * count
    spec = decoder_spec(fields, qkv_bias=bias, o_bias=bias, mlp_bias=fields.boolean("mlp_bias"), windows=windows)
    mixers = {
        index: replace(layer.attention, rope=replace(layer.attention.rope, kind="none"))
        for index, layer in enumerate(spec.layers)
        if not rotated[index]
    }
    return replace_mixers(spec, mixers)
