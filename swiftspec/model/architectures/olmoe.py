"""OLMoE: a mixture of experts in each layer, and a norm of whole query and key projections."""

from __future__ import annotations

from dataclasses import replace

from swiftspec.errors import UserError
from swiftspec.file_io import Fields
from swiftspec.model.architectures.decoder import decoder_spec, refuse_sliding_windows
from swiftspec.model.architectures.qwen3_moe import with_mixtures
from swiftspec.model.spec import ModelSpec

DEFAULTS = {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "max_position_embeddings": 4096}


def olmoe_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of an OlmoeForCausalLM."""
    refuse_sliding_windows(fields)
    if fields.data.get("clip_qkv") is not None:
        raise UserError("limits of queries, keys and values (clip_qkv) are not supported")
    bias = fields.boolean("attention_bias")
    spec = decoder_spec(fields, qkv_bias=bias, o_bias=bias, qk_norm="projection")
    experts = replace(fields, data={**fields.data, "moe_intermediate_size": fields.data.get("intermediate_size")})
    return with_mixtures(experts, spec, norm_topk_prob=fields.boolean("norm_topk_prob"))
