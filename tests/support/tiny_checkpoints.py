"""Small random checkpoints, written by transformers, whose greedy text varies enough to compare."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from swiftspec.model.batch import Batch

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
FAMILIES = ["llama", "qwen2", "qwen3"]  # those whose layers are alike and that accept each of ROPES
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "beta_fast": 4.0, "beta_slow": 1.0,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 4.0, 8.0], "original_max_position_embeddings": 64,
}  # fmt: skip
DELTA = {
    "layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 16, "rope": {**ROPES["default"], "partial_rotary_factor": 0.5},
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
SHARED_EXPERT = {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 40,
}  # fmt: skip
# what the checkpoints of the other families have in addition; windows are shorter than the texts of the tests
OTHER_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "layers": 3, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "qwen2_moe": {**SHARED_EXPERT, "layers": 3, "mlp_only_layers": [1]},
    "gpt_oss": {
        "layers": 3, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 6,
        "rope": {**YARN, "truncate": False},
    },
    "qwen3_next": {**DELTA, **SHARED_EXPERT, "mlp_only_layers": [1]},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **SHARED_EXPERT},
    "mistral": {"sliding_window": 6},
    "ministral": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": None},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "head_dim": 8},
    "seed_oss": {"attention_bias": True, "attention_out_bias": False},
    "cwm": {"layers": 5, "sliding_window": 5, "rope": ROPES["llama3"]},
    "arcee": {"mlp_bias": True},
    "ernie4_5": {"use_bias": True, "tie": True},
    "gemma2": {
        "layers": 3, "sliding_window": 5, "query_pre_attn_scalar": 20, "tie": True, "final_logit_softcapping": 3.0,
        "attn_logit_softcapping": 2.0,
    },
    "ministral3": {
        "rope": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.3},
        "sliding_window": None,
    },
    "smollm3": {"layers": 4, "tie": True},
    "granite": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2, "logits_scaling": 2.5,
    },
    "olmo2": {"num_key_value_heads": 4, "rope": YARN},
    "olmo3": {
        "layers": 4, "sliding_window": 5,
        "rope": {"full_attention": YARN, "sliding_attention": ROPES["default"]},
    },
    "phi3": {"sliding_window": 9, "rope": LONGROPE, "original_max_position_embeddings": 64},
    "glm": {"rope": {**ROPES["default"], "partial_rotary_factor": 0.5}, "attention_bias": True},
    "glm4": {"rope": {**ROPES["default"], "partial_rotary_factor": 0.5}, "attention_bias": True, "head_dim": 12},
    "glm4_moe": {
        "layers": 3, "rope": {**ROPES["default"], "partial_rotary_factor": 0.5}, "attention_bias": True,
        "use_qk_norm": True, "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
        "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7,
    },
    "hunyuan_v1_dense": {
        "attention_bias": True, "rope": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 20.0, "factor": 1.0},
    },
    "gemma3_text": {
        "layers": 3, "sliding_window": 5, "sliding_window_pattern": 3, "query_pre_attn_scalar": 20, "tie": True,
        "rope": {"full_attention": ROPES["linear"], "sliding_attention": ROPES["default"]},
        "final_logit_softcapping": 3.0,
    },
    "gemma4_text": {
        "layers": 3, "sliding_window": 5, "tie": True, "global_head_dim": 16, "num_global_key_value_heads": 1,
        "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 3.0,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "rope": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": ROPES["default"],
        },
    },
}  # fmt: skip
ALL_FAMILIES = [*FAMILIES, *OTHER_FAMILIES]
HYBRIDS = [family for family in OTHER_FAMILIES if "linear_num_key_heads" in OTHER_FAMILIES[family]]


def make_model(
    *,
    family: str = "llama",
    rope: dict[str, Any] | None = None,
    tie: bool | None = None,
    vocab: int = 64,
    layers: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **config: Any,
) -> PreTrainedModel:
    """A random transformers model; `config` overrides any field, such as num_key_value_heads or attention_bias."""
    given = OTHER_FAMILIES.get(family, {}) | config
    own = {name: given.pop(name, None) for name in ("rope", "tie", "layers")}
    rope, tie = rope or own["rope"], bool(own["tie"]) if tie is None else tie
    fields: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "num_hidden_layers": layers or own["layers"] or 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 512,
        "rope_parameters": deepcopy(rope or ROPES["default"]),
        "tie_word_embeddings": tie,
        "dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    fields |= given
    fields.setdefault("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields)).to(dtype).eval()
    model.set_experts_implementation("eager")  # the only one that computes in float64
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # strong layers: with weak ones the residual stream repeats its token, especially with tied embeddings
            matrix = weight.ndim == 2 or "experts" in name
            scale = 1.0 if "embed" in name else 2.5 / weight.shape[-1] ** 0.5 if matrix else 0.3
            if family == "gpt_oss" and name.endswith((".sinks", ".gate_up_proj")):
                scale *= 5  # sinks that outweigh keys, and gates beyond the limit of the clamped SwiGLU
            drawn = scale * torch.randn(weight.shape, generator=noise, dtype=torch.float64)
            weight.copy_(1 + drawn if "norm" in name else drawn)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.8)
            elif name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=noise))
    return model


def make_checkpoint(path: Path, *, shards: int = 1, **model: Any) -> PreTrainedModel:
    """Writes `make_model(**model)` to a directory, in about `shards` files, and returns it."""
    built = make_model(**model)
    size = sum(weight.numel() * weight.element_size() for weight in built.parameters())
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        built.save_pretrained(path, max_shard_size=size // shards if shards > 1 else 2 * size)
    finally:
        if bars:
            logging.enable_progress_bar()
    return built


def chain(tokens: list[int], start: int = 0, sequence: int = 0, sequences: int = 1) -> Batch:
    """Consecutive tokens of one sequence: a prompt, or a chunk of it after `start` others."""
    count = len(tokens)
    places = torch.arange(start, start + count)
    lengths = torch.zeros(sequences, dtype=torch.int64)
    lengths[sequence] = start + count
    return Batch(
        tokens=torch.tensor(tokens),
        positions=places,
        slots=places,
        mask=torch.ones(count, count, dtype=torch.bool).tril(),
        sequence=torch.full((count,), sequence),
        kv_len=lengths,
    )


def make_pair(folder: Path, *, vocab: int = 64, seed: int = 1, **shape: Any) -> tuple[Path, Path]:
    """Checkpoints of a target and of a draft that often agrees with it: the same model with noise on its weights."""
    model = make_checkpoint(folder / "target", vocab=vocab, dtype=torch.float64, seed=seed, **shape)
    noise = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=noise, dtype=weight.dtype)
    model.save_pretrained(folder / "draft")
    return folder / "target", folder / "draft"
