"""Qwen2: Qwen2, Qwen2.5 and the R1 distillations of them."""

from __future__ import annotations

from swiftspec.file_io import Fields
from swiftspec.model.architectures.decoder import decoder_spec
from swiftspec.model.spec import ModelSpec


def qwen2_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a Qwen2ForCausalLM."""
    return decoder_spec(fields, qkv_bias=True, o_bias=False, mlp_bias=False, qk_norm=False)
