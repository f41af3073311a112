"""Mixtral: layers of Mistral with a mixture of experts in each."""

from __future__ import annotations

from dataclasses import replace

from swiftspec.file_io import Fields
from swiftspec.model.architectures.mistral import mistral_spec
from swiftspec.model.architectures.qwen3_moe import with_mixtures
from swiftspec.model.spec import ModelSpec
from swiftspec.model.tensor_names import TensorNames

DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 131072,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
NAMES = TensorNames(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
)


def mixtral_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a MixtralForCausalLM."""
    experts = replace(fields, data={**fields.data, "moe_intermediate_size": fields.data.get("intermediate_size")})
    return with_mixtures(experts, mistral_spec(fields), norm_topk_prob=True)
