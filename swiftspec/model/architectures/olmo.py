"""OLMo 2 and 3: norms after attention and MLP instead of before, and of whole query and key projections. Three of four
layers of OLMo 3 have a sliding window, and its RoPE scaling applies to the fourth."""

from __future__ import annotations

from dataclasses import replace

from swiftspec.file_io import Fields
from swiftspec.model.architectures.decoder import (
    FULL,
    SLIDING,
    decoder_spec,
    layer_kinds,
    parse_rope,
    refuse_sliding_windows,
    replace_mixers,
    sliding_every,
    windows_of,
)
from swiftspec.model.spec import ModelSpec, RopeSpec

OLMO2_DEFAULTS = {"rms_norm_eps": 1e-5}
OLMO3_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096}


def olmo2_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of an Olmo2ForCausalLM."""
    refuse_sliding_windows(fields)
    return _olmo_spec(fields, [])


def olmo3_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of an Olmo3ForCausalLM."""
    kinds = layer_kinds(fields, sliding_every(fields, 4))
    # without separate parameters, the sliding layers have the same base and no scaling
    full = parse_rope(fields.data, FULL)
    nested = SLIDING in fields.object("rope_parameters").data
    ropes = {FULL: full, SLIDING: parse_rope(fields.data, SLIDING) if nested else RopeSpec(full.theta)}
    spec = _olmo_spec(fields, windows_of(fields, kinds))
    mixers = (replace(layer.attention, rope=ropes[kind]) for layer, kind in zip(spec.layers, kinds, strict=True))
    return replace_mixers(spec, dict(enumerate(mixers)))


def _olmo_spec(fields: Fields, windows: list[int | None]) -> ModelSpec:
    bias = fields.boolean("attention_bias")
    return decoder_spec(fields, qkv_bias=bias, o_bias=bias, qk_norm="projection", norms="after", windows=windows)
