"""Seed-OSS: layers of Llama with biases of queries, keys and values."""

from __future__ import annotations

from swiftspec.file_io import Fields
from swiftspec.model.architectures.decoder import decoder_spec, refuse_sliding_windows
from swiftspec.model.spec import ModelSpec

DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "max_position_embeddings": 524288,
}


def seed_oss_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a SeedOssForCausalLM."""
    refuse_sliding_windows(fields)
    return decoder_spec(
        fields,
        qkv_bias=fields.boolean("attention_bias"),
        o_bias=fields.boolean("attention_out_bias"),
        mlp_bias=fields.boolean("mlp_bias"),
    )
