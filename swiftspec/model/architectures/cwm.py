"""CWM (Code World Model): layers of Llama, of which three of four have a sliding window."""

from __future__ import annotations

from swiftspec.file_io import Fields
from swiftspec.model.architectures.decoder import FULL, SLIDING, decoder_spec, layer_count, layer_kinds, windows_of
from swiftspec.model.spec import ModelSpec

DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "sliding_window": 8192,
    "rope_theta": 1e6,
}


def cwm_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a CwmForCausalLM."""
    usual = [SLIDING if index % 4 else FULL for index in range(layer_count(fields))]
    windows = windows_of(fields, layer_kinds(fields, usual))
    return decoder_spec(fields, mlp_bias=fields.boolean("mlp_bias"), windows=windows)
