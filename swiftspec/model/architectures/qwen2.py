"""Qwen2: Qwen2, Qwen2.5 and the R1 distillations of them."""

from __future__ import annotations

from swiftspec.file_io import Fields
from swiftspec.model.architectures.decoder import FULL, SLIDING, decoder_spec, layer_count, layer_kinds, windows_of
from swiftspec.model.spec import ModelSpec


def qwen2_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a Qwen2ForCausalLM."""
    return decoder_spec(fields, qkv_bias=True, windows=qwen_windows(fields))


def qwen_windows(fields: Fields) -> list[int | None]:
    """Returns the sliding window of each layer: that of the layers from `max_window_layers` on, if the model uses
    windows."""
    count = layer_count(fields)
    if not fields.boolean("use_sliding_window"):
        return [None] * count
    full = fields.integer("max_window_layers", 28, ge=0, le=2**14)
    return windows_of(fields, layer_kinds(fields, [FULL if index < full else SLIDING for index in range(count)]))
