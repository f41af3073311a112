"""GLM-4.5 to 4.7: a mixture of experts with a shared expert in all layers but the first ones, experts chosen by sigmoid
scores with a correction bias, RoPE of half a head, and in the larger models norms of query and key heads."""

from __future__ import annotations

from dataclasses import replace

from swiftspec.errors import UserError
from swiftspec.file_io import Fields
from swiftspec.model.architectures.decoder import decoder_spec, refuse_sliding_windows
from swiftspec.model.architectures.qwen3_moe import with_mixtures
from swiftspec.model.spec import ExpertsSpec, LayerSpec, ModelSpec, SigmoidRouting
from swiftspec.model.tensor_names import TensorNames

DEFAULTS = {
    "intermediate_size": 10944,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_routed_experts": 128,
    "norm_topk_prob": True,
}
NAMES = TensorNames(
    shared_gate_proj="mlp.shared_experts.gate_proj",
    shared_up_proj="mlp.shared_experts.up_proj",
    shared_down_proj="mlp.shared_experts.down_proj",
    mtp_layer=True,
)


def glm4_moe_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a Glm4MoeForCausalLM."""
    refuse_sliding_windows(fields)
    qk_norm = "head" if fields.boolean("use_qk_norm") else "none"
    spec = decoder_spec(fields, partial_rope=True, qkv_bias=fields.boolean("attention_bias"), qk_norm=qk_norm)
    dense = fields.integer("first_k_dense_replace", 1, ge=0, le=2**14)
    renamed = {"num_experts": fields.data.get("n_routed_experts"), "mlp_only_layers": [*range(dense)]}
    spec = with_mixtures(
        replace(fields, data={**fields.data, **renamed}), spec, norm_topk_prob=fields.boolean("norm_topk_prob")
    )
    return replace(spec, layers=tuple(_layer(fields, layer) for layer in spec.layers))


def _layer(fields: Fields, layer: LayerSpec) -> LayerSpec:
    """Returns a layer whose mixture, if it has one, chooses by sigmoid scores and has the shared expert."""
    experts = layer.mlp.experts
    if experts is None:
        return layer
    shared = fields.integer("n_shared_experts", 1, ge=0, le=2**8) * layer.mlp.intermediate_size
    experts = replace(
        experts, shared_intermediate_size=shared, shared_gate=shared == 0, sigmoid=_routing(fields, experts)
    )
    return replace(layer, mlp=replace(layer.mlp, experts=experts))


def _routing(fields: Fields, experts: ExpertsSpec) -> SigmoidRouting:
    count = experts.num_experts
    groups = fields.integer("n_group", 1, ge=1, le=2**14)
    used = fields.integer("topk_group", 1, ge=1, le=2**14)
    if count % groups or used > groups or (used < groups and count < 2 * groups):
        raise UserError(f"n_group {groups} and topk_group {used} do not fit {count} experts")
    if experts.experts_per_token > count // groups * used:
        raise UserError(f"num_experts_per_tok {experts.experts_per_token} exceeds the experts of topk_group {used}")
    return SigmoidRouting(groups, used, fields.number("routed_scaling_factor", 1.0, ge=1e-6, le=1e6))
