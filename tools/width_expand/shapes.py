"""Target shapes of width expansion, and the config.json of a width-expanded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch

from swiftspec.errors import UserError
from swiftspec.model.config import ModelConfig
from swiftspec.model.config_json import parse_config
from tools.width_expand.maps import GROUP

FIELDS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "tie_word_embeddings",
)  # fmt: skip
SHAPES: dict[str, tuple[int | bool, ...]] = {
    "Llama-3.2-1B": (2048, 16, 32, 8, 64, 8192, 128256, True),
    "Llama-3.2-3B": (3072, 28, 24, 8, 128, 8192, 128256, True),
    "Llama-3-8B": (4096, 32, 32, 8, 128, 14336, 128256, False),
    "Llama-3-70B": (8192, 80, 64, 8, 128, 28672, 128256, False),
}
Kind = Literal["int4", "bf16", "f32"]
DTYPES = {"int4": torch.bfloat16, "bf16": torch.bfloat16, "f32": torch.float32}


def read_shape(shape: str) -> dict[str, Any]:
    """Returns the sizes in FIELDS for the name of a shape or a config.json. Raises UserError if it is neither."""
    if shape in SHAPES:
        return dict(zip(FIELDS, SHAPES[shape], strict=True))
    if not Path(shape).is_file():
        raise UserError(f"{shape}: expected {', '.join(SHAPES)}, or the path of a config.json")
    data = json.loads(Path(shape).read_text(encoding="utf-8"))
    config = parse_config(data)
    sizes = (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim)
    rest = (config.intermediate_size, config.vocab_size, config.tie_word_embeddings)
    return dict(zip(FIELDS, sizes + rest, strict=True))


def grown_config(small: ModelConfig, sizes: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """Returns the config.json of the small model in the large shape `sizes`, with weights of type `kind`."""
    share = small.hidden_size / sizes["hidden_size"]
    rope: dict[str, Any] = {"rope_theta": small.rope.theta, "rope_type": small.rope.kind}
    if small.rope.kind != "default":
        rope |= {"factor": small.rope.factor}
    if small.rope.kind == "llama3":
        rope |= {"low_freq_factor": small.rope.low_freq_factor, "high_freq_factor": small.rope.high_freq_factor}
        rope |= {"original_max_position_embeddings": small.rope.original_max_position}
    family = "Llama" if small.family == "llama" else "Qwen2"
    quant = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP, "zero_point": True}
    return sizes | {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": small.family,
        "hidden_act": "silu",
        "rms_norm_eps": small.rms_norm_eps * share / (2 if sizes["vocab_size"] > small.vocab_size else 1),
        "rope_parameters": rope,
        "max_position_embeddings": small.max_position_embeddings,
        "attention_bias": small.family == "llama" and small.qkv_bias,
        "mlp_bias": small.mlp_bias,
        "eos_token_id": list(small.eos_token_ids),
        "torch_dtype": str(DTYPES[kind]).removeprefix("torch."),
        **({"quantization_config": quant} if kind == "int4" else {}),
    }
