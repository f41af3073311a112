"""Reads what a checkpoint's config.json says, where this engine follows it; the rest is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from swiftspec.errors import UserError
from swiftspec.model.config import ModelConfig, RopeConfig

Json = Mapping[str, Any]
DTYPES = ("bfloat16", "float16", "float32", "float64")
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


def parse_config(data: Json) -> ModelConfig:
    """Reads a config.json of transformers 4 or 5. Raises UserError on what is not supported."""
    family = _family(data)
    hidden, heads = _size(data, "hidden_size"), _size(data, "num_attention_heads")
    kv_heads = _size(data, "num_key_value_heads", heads)
    head_dim = _size(data, "head_dim", hidden // heads)
    if heads % kv_heads:
        raise UserError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise UserError(f"head_dim {head_dim} is odd")
    if data.get("hidden_act", "silu") != "silu":
        raise UserError(f"hidden_act {data['hidden_act']!r} is not supported; only 'silu' is")
    attention_bias = bool(data.get("attention_bias"))
    return ModelConfig(
        family=family,
        vocab_size=_size(data, "vocab_size"),
        hidden_size=hidden,
        num_layers=_size(data, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=_size(data, "intermediate_size"),
        rms_norm_eps=_number(data, "rms_norm_eps", 1e-6),
        rope=parse_rope(data),
        max_position_embeddings=_size(data, "max_position_embeddings", 2048),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=family == "llama" and attention_bias,
        mlp_bias=family == "llama" and bool(data.get("mlp_bias")),
        tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
        dtype=_dtype(data),
        quantization=read_object(data, "quantization_config"),
        eos_token_ids=_ids(data, "eos_token_id"),
    )


def parse_rope(data: Json) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (transformers 4)."""
    scaling = read_object(data, "rope_parameters") or read_object(data, "rope_scaling")
    both = {**data, **scaling}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise UserError(f"RoPE type {kind!r} is not supported; default, linear and llama3 are")
    if both.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UserError("a partial_rotary_factor other than 1 is not supported")
    theta = _number(both, "rope_theta", 10000.0)
    if kind == "default":
        return RopeConfig(theta)
    factor = _number(scaling, "factor")
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    if low >= high:
        raise UserError(f"RoPE low_freq_factor {low} must be below high_freq_factor {high}")
    return RopeConfig(theta, kind, factor, low, high, _size(scaling, "original_max_position_embeddings"))


def _family(data: Json) -> Literal["llama", "qwen2"]:
    names, kind = data.get("architectures") or [], data.get("model_type")
    name = names[0] if names else _ARCHITECTURES.get(str(kind), kind)
    if name not in _ARCHITECTURES.values():
        known = " and ".join(_ARCHITECTURES.values())
        raise UserError(f"architecture {name!r} is not supported; {known} are")
    sliding = "sliding_attention" in (data.get("layer_types") or ())
    if name == _ARCHITECTURES["llama"]:
        return "llama"
    if data.get("use_sliding_window") or sliding:
        raise UserError("sliding window attention is not supported")
    return "qwen2"


def _dtype(data: Json) -> str:
    name = str(data.get("dtype") or data.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise UserError(f"dtype {name!r} is not supported; {', '.join(DTYPES)} are")
    return name


def _number(data: Json, key: str, default: float | None = None) -> float:
    value = data.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UserError(f"{key} is missing" if value is None else f"{key} must be a positive number, not {value!r}")
    return float(value)


def _size(data: Json, key: str, default: int | None = None) -> int:
    value = default if data.get(key) is None else data[key]
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise UserError(f"{key} is missing" if value is None else f"{key} must be a positive integer, not {value!r}")
    return value


def read_object(data: Json, key: str) -> Json:
    value = data.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise UserError(f"{key} must be an object, not {value!r}")
    return value or {}


def _ids(data: Json, key: str) -> tuple[int, ...]:
    value = data.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise UserError(f"{key} must be a token id or a list of them, not {value!r}")
    return tuple(ids)
