"""Qwen3.5, dense: three of four layers are delta layers; attention with an output gate and partial RoPE; norms with 1 +
weight. The layer of multi-token prediction (MTP) in the checkpoints is a draft head (draft_heads.py)."""

from __future__ import annotations

from dataclasses import replace

from swiftspec.errors import UserError
from swiftspec.file_io import Fields
from swiftspec.model.architectures.decoder import FULL, decoder_spec, layer_count, layer_kinds
from swiftspec.model.spec import GatedDeltaSpec, ModelSpec
from swiftspec.model.tensor_names import TensorNames

LINEAR = "linear_attention"  # of `layer_types`
DEFAULTS = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
NAMES = TensorNames(text_prefixes=("model.", "lm_head."))  # beyond them are the weights of MTP


def qwen3_5_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a Qwen3_5ForCausalLM."""
    bias = fields.boolean("attention_bias")
    spec = decoder_spec(fields, qkv_bias=bias, o_bias=bias, qk_norm="head", partial_rope=True)
    kinds, delta = _layer_kinds(fields), _delta_spec(fields)
    layers = (
        replace(layer, mixer=delta if kind == LINEAR else replace(layer.attention, output_gate=True))
        for layer, kind in zip(spec.layers, kinds, strict=True)
    )
    return replace(spec, layers=tuple(layers), norm_unit_offset=True)


def _layer_kinds(fields: Fields) -> list[str]:
    """Returns `layer_types`, or by default every fourth layer with attention. At least one layer must have it."""
    period = fields.integer("full_attention_interval", 4, ge=1, le=2**14)
    default = [LINEAR if (index + 1) % period else FULL for index in range(layer_count(fields))]
    kinds = layer_kinds(fields, default, (FULL, LINEAR))
    if FULL not in kinds:
        raise UserError(f"a model without a layer of type {FULL} is not supported")
    return kinds


def _delta_spec(fields: Fields) -> GatedDeltaSpec:
    k_heads, v_heads = (fields.integer(f"linear_num_{name}_heads", ge=1, le=2**14) for name in ("key", "value"))
    k_dim, v_dim = (fields.integer(f"linear_{name}_head_dim", ge=1, le=2**14) for name in ("key", "value"))
    if v_heads % k_heads:
        raise UserError(f"linear_num_value_heads {v_heads} is not a multiple of linear_num_key_heads {k_heads}")
    # the window of the convolution must lie in the slots that a delta cache keeps: cache/delta.py
    return GatedDeltaSpec(k_heads, v_heads, k_dim, v_dim, fields.integer("linear_conv_kernel_dim", ge=1, le=32))
