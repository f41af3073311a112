"""Qwen3-MoE: Qwen3 with mixtures of experts instead of the MLPs of some or all layers."""

from __future__ import annotations

from dataclasses import replace

from swiftspec.errors import UserError
from swiftspec.file_io import Fields
from swiftspec.model.architectures.decoder import SLIDING, decoder_spec, layer_count, windows_of
from swiftspec.model.spec import ExpertsSpec, ModelSpec

DEFAULTS = {
    "intermediate_size": 6144,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
MAX_EXPERTS = 2**14


def qwen3_moe_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a Qwen3MoeForCausalLM."""
    count, bias = layer_count(fields), fields.boolean("attention_bias")
    windows = windows_of(fields, [SLIDING] * count) if fields.boolean("use_sliding_window") else [None] * count
    spec = decoder_spec(fields, qkv_bias=bias, o_bias=bias, qk_norm="head", windows=windows)
    return with_mixtures(fields, spec, norm_topk_prob=fields.boolean("norm_topk_prob"))


def with_mixtures(fields: Fields, spec: ModelSpec, *, norm_topk_prob: bool, shared: bool = False) -> ModelSpec:
    """Returns the spec with mixtures of experts instead of the MLPs of all layers but those that `decoder_sparse_step`
    and `mlp_only_layers` name. `shared`: whether the mixtures have a shared expert."""
    experts = _experts(fields, norm_topk_prob)
    if shared:
        size = fields.integer("shared_expert_intermediate_size", ge=1, le=2**22)
        experts = replace(experts, shared_intermediate_size=size)
    inner = fields.integer("moe_intermediate_size", ge=1, le=2**22)
    mlp = replace(spec.layers[0].mlp, intermediate_size=inner, experts=experts)
    period = fields.integer("decoder_sparse_step", 1, ge=1, le=2**14)
    dense = {*fields.integers("mlp_only_layers", ge=0, le=2**14)}
    layers = (
        layer if index in dense or (index + 1) % period else replace(layer, mlp=mlp)
        for index, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers))


def _experts(fields: Fields, norm_topk_prob: bool) -> ExpertsSpec:
    name = "num_experts" if fields.data.get("num_experts") is not None else "num_local_experts"
    experts = fields.integer(name, 128, ge=1, le=MAX_EXPERTS)
    chosen = fields.integer("num_experts_per_tok", ge=1, le=MAX_EXPERTS)
    if chosen > experts:
        raise UserError(f"num_experts_per_tok {chosen} exceeds {name} {experts}")
    return ExpertsSpec(experts, chosen, norm_topk_prob)
