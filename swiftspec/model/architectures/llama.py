"""Llama: Llama 2 and 3, DeepSeek-Coder and models with the same layers."""

from __future__ import annotations

from swiftspec.file_io import Fields
from swiftspec.model.architectures.decoder import decoder_spec, refuse_sliding_windows
from swiftspec.model.spec import ModelSpec


def llama_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a LlamaForCausalLM."""
    refuse_sliding_windows(fields)
    bias = fields.boolean("attention_bias")
    return decoder_spec(fields, qkv_bias=bias, o_bias=bias, mlp_bias=fields.boolean("mlp_bias"))
