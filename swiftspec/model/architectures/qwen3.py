"""Qwen3, dense: no biases, and an RMSNorm of each query and key head."""

from __future__ import annotations

from swiftspec.file_io import Fields
from swiftspec.model.architectures.decoder import decoder_spec
from swiftspec.model.architectures.qwen2 import qwen_windows
from swiftspec.model.spec import ModelSpec


def qwen3_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a Qwen3ForCausalLM."""
    bias = fields.boolean("attention_bias")
    return decoder_spec(fields, qkv_bias=bias, o_bias=bias, qk_norm="head", windows=qwen_windows(fields))
