"""Parser of a checkpoint's config.json. An unsupported feature raises UserError, which names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from swiftspec.errors import UserError, truncated_repr
from swiftspec.file_io import Fields
from swiftspec.model.config import ModelConfig, RopeConfig

Json = Mapping[str, Any]
DTYPES = ("bfloat16", "float16", "float32", "float64")
MOST_POSITIONS = 2**31 - 1  # the bounds in this file exceed the values of real models and exclude overflow
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


def parse_config(data: Json) -> ModelConfig:
    """Parses a config.json of transformers 4 or 5. Raises UserError on unsupported features."""
    fields = Fields(data)
    family = _architecture(fields)
    hidden = fields.integer("hidden_size", ge=1, le=2**18)
    heads = fields.integer("num_attention_heads", ge=1, le=2**14)
    kv_heads = fields.integer("num_key_value_heads", heads, ge=1, le=2**14)
    head_dim = fields.integer("head_dim", max(hidden // heads, 1), ge=1, le=2**14)
    if heads % kv_heads:
        raise UserError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise UserError(f"head_dim {head_dim} is odd")
    activation = fields.string("hidden_act", "silu")
    if activation != "silu":
        raise UserError(f"hidden_act {truncated_repr(activation)} is not supported; only 'silu' is")
    attention_bias, mlp_bias = fields.boolean("attention_bias"), fields.boolean("mlp_bias")
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size", ge=1, le=2**26),
        hidden_size=hidden,
        num_layers=fields.integer("num_hidden_layers", ge=1, le=2**14),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size", ge=1, le=2**22),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, ge=1e-30, le=1.0),
        rope=parse_rope(data),
        max_position_embeddings=fields.integer("max_position_embeddings", 2048, ge=2, le=MOST_POSITIONS),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=family == "llama" and attention_bias,
        mlp_bias=family == "llama" and mlp_bias,
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        dtype=_dtype(fields),
        quantization=fields.object("quantization_config").data,
        eos_token_ids=stop_tokens(fields),
    )


def stop_tokens(fields: Fields) -> tuple[int, ...]:
    """Returns the token ids of `eos_token_id`, a number or a list; empty if it is missing. Negative ids are ignored."""
    ids = fields.integers("eos_token_id", ge=-1, le=2**31 - 1)
    return tuple(token for token in ids if token >= 0)


def parse_rope(data: Json) -> RopeConfig:
    """Parses `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (transformers 4)."""
    fields = Fields(data)
    newer, older = fields.object("rope_parameters"), fields.object("rope_scaling")
    scaling = newer if newer.data else older
    both = Fields({**data, **scaling.data})
    kind = scaling.string("rope_type", scaling.string("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise UserError(f"RoPE type {truncated_repr(kind)} is not supported; default, linear and llama3 are")
    if both.number("partial_rotary_factor", 1.0, ge=0.0, le=1.0) != 1:
        raise UserError("a partial_rotary_factor other than 1 is not supported")
    theta = both.number("rope_theta", 10000.0, ge=1.0, le=1e15)
    if kind == "default":
        return RopeConfig(theta)
    factor = scaling.number("factor", ge=0.01, le=1e6)
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    low, high = (scaling.number(f"{end}_freq_factor", ge=1e-3, le=1e6) for end in ("low", "high"))
    if low >= high:
        raise UserError(f"RoPE low_freq_factor {low} must be below high_freq_factor {high}")
    original = scaling.integer("original_max_position_embeddings", ge=1, le=MOST_POSITIONS)
    return RopeConfig(theta, kind, factor, low, high, original)


def _architecture(fields: Fields) -> Literal["llama", "qwen2"]:
    names, kind = fields.strings("architectures"), fields.string("model_type", "")
    name = names[0] if names else _ARCHITECTURES.get(kind, kind or None)
    if name not in _ARCHITECTURES.values():
        known = " and ".join(_ARCHITECTURES.values())
        raise UserError(f"architecture {truncated_repr(name)} is not supported; {known} are")
    sliding = "sliding_attention" in fields.strings("layer_types")
    if name == _ARCHITECTURES["llama"]:
        return "llama"
    if fields.boolean("use_sliding_window") or sliding:
        raise UserError("sliding window attention is not supported")
    return "qwen2"


def _dtype(fields: Fields) -> str:
    name = fields.string("dtype", fields.string("torch_dtype", "float32")).removeprefix("torch.")
    if name not in DTYPES:
        raise UserError(f"dtype {truncated_repr(name)} is not supported; {', '.join(DTYPES)} are")
    return name
