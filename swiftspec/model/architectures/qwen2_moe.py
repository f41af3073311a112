"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with mixtures of experts that have a shared expert."""

from __future__ import annotations

from swiftspec.file_io import Fields
from swiftspec.model.architectures.decoder import FULL, SLIDING, decoder_spec, layer_count, layer_kinds, windows_of
from swiftspec.model.architectures.qwen3_moe import with_mixtures
from swiftspec.model.spec import ModelSpec

DEFAULTS = {
    "intermediate_size": 5632,
    "num_key_value_heads": 16,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "qkv_bias": True,
}


def qwen2_moe_spec(fields: Fields) -> ModelSpec:
    """Returns the spec of a Qwen2MoeForCausalLM."""
    spec = decoder_spec(fields, qkv_bias=fields.boolean("qkv_bias"), windows=_windows(fields))
    return with_mixtures(fields, spec, norm_topk_prob=fields.boolean("norm_topk_prob"), shared=True)


def _windows(fields: Fields) -> list[int | None]:
    """Returns the sliding window of each layer: that of every second layer before `max_window_layers`, if the model
    uses windows."""
    count = layer_count(fields)
    if not fields.boolean("use_sliding_window"):
        return [None] * count
    end = fields.integer("max_window_layers", 28, ge=0, le=2**14)
    kinds = [SLIDING if index % 2 == 0 and index < end else FULL for index in range(count)]
    return windows_of(fields, layer_kinds(fields, kinds))
