"""Qwen3.5-MoE: Qwen3.5 with a mixture of experts that has a shared expert in every layer."""

from __future__ import annotations

from swiftspec.errors import UserError
from swiftspec.file_io import Fields
from swiftspec.model.architectures import qwen3_5
from swiftspec.model.architectures.qwen3_moe import with_mixtures
from swiftspec.model.spec import ModelSpec

DEFAULTS = qwen3_5.DEFAULTS | {
    "hidden_size": 2048,
    "intermediate_size": 512,  # of a dense MLP, which no layer has
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


def qwen3_5_moe_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a Qwen3_5MoeForCausalLM."""
    if fields.integers("mlp_only_layers", ge=0, le=2**14) or fields.integer("decoder_sparse_step", 1, ge=1) != 1:
        dense = "layers without experts (mlp_only_layers, decoder_sparse_step)"
        raise UserError(f"{dense} are not supported in this architecture")
    return with_mixtures(fields, qwen3_5.qwen3_5_spec(fields), norm_topk_prob=True, shared=True)
