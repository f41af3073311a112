"""Qwen3-Next: layers of Qwen3.5 with mixtures of experts that have a shared expert. In the checkpoint a delta layer has
two projections, whose rows are ordered by key head."""

from __future__ import annotations

from dataclasses import replace

from swiftspec.file_io import Fields
from swiftspec.model.architectures import qwen3_5
from swiftspec.model.architectures.qwen3_moe import with_mixtures
from swiftspec.model.spec import ModelSpec

DEFAULTS = qwen3_5.DEFAULTS | {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
NAMES = replace(qwen3_5.NAMES, delta_qkv_gate="linear_attn.in_proj_qkvz", rates="linear_attn.in_proj_ba")


def qwen3_next_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a Qwen3NextForCausalLM."""
    spec = qwen3_5.qwen3_5_spec(fields)
    return with_mixtures(fields, spec, norm_topk_prob=fields.boolean("norm_topk_prob"), shared=True)
