"""Arcee (AFM): layers of Llama with an MLP without a gate, down(relu(up(x))^2). As a gated MLP this is
down(relu(up(x)) * up(x)), with one matrix for gate and up."""

from __future__ import annotations

from swiftspec.file_io import Fields
from swiftspec.model.architectures.decoder import decoder_spec, refuse_sliding_windows
from swiftspec.model.spec import ModelSpec
from swiftspec.model.tensor_names import TensorNames

DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
NAMES = TensorNames(gate="mlp.up_proj")


def arcee_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of an ArceeForCausalLM."""
    refuse_sliding_windows(fields)
    bias = fields.boolean("attention_bias")
    mlp_bias = fields.boolean("mlp_bias")
    return decoder_spec(fields, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias, activation="relu2")
