"""What a checkpoint's config.json says, where this engine follows it; the rest is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from swiftspec.errors import UserError

Json = Mapping[str, Any]
DTYPES = ("bfloat16", "float16", "float32", "float64")
GROUP_SIZES = (32, 64, 128)
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: `theta`, and how the frequencies are stretched beyond the trained length."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # this and the next two: llama3 only
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    @staticmethod
    def from_dict(data: Json) -> RopeConfig:
        """Reads `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (transformers 4)."""
        scaling = _object(data, "rope_parameters") or _object(data, "rope_scaling")
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


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """Four-bit weights: W = (q - z) * s with one scale and one zero point for each `group_size` inputs.

    Which modules were left dense the loader sees from the tensors that are there.
    """

    layout: Literal["awq-gemm", "pack-quantized"]
    bits: int
    group_size: int
    zero_point: bool  # the file holds zero points; if not, they are 8

    @staticmethod
    def from_dict(data: Json) -> QuantConfig:
        """Reads `quantization_config` of AutoAWQ or compressed-tensors."""
        method = data.get("quant_method")
        if method == "awq":
            return _awq(data)
        if method == "compressed-tensors":
            return _compressed_tensors(data)
        raise UserError(f"quantisation method {method!r} is not supported; awq and compressed-tensors are")


def _awq(data: Json) -> QuantConfig:
    version = str(data.get("version") or data.get("format") or "gemm").lower()
    if version != "gemm":
        raise UserError(f"AWQ version {version!r} is not supported; only 'gemm' is")
    bits = data.get("bits", data.get("w_bit", 4))
    group = data.get("group_size", data.get("q_group_size", 128))
    _check_int4("AWQ", bits, group)
    if not data.get("zero_point", True):
        raise UserError("AWQ without zero points is not supported")
    return QuantConfig("awq-gemm", 4, group, True)


def _compressed_tensors(data: Json) -> QuantConfig:
    groups = _object(data, "config_groups")
    if len(groups) != 1:
        raise UserError("compressed-tensors with other than one config group is not supported")
    group = _object(groups, *groups)
    layout = group.get("format") or data.get("format")
    if layout != "pack-quantized":
        raise UserError(f"compressed-tensors format {layout!r} is not supported; only 'pack-quantized' is")
    sparsity = _object(data, "sparsity_config").get("format", "dense")
    refused = {
        "quantised activations": group.get("input_activations") or group.get("output_activations"),
        "a quantised KV cache": data.get("kv_cache_scheme"),
        "weight transforms": data.get("transform_config"),
        f"sparsity {sparsity!r}": sparsity != "dense",
    }
    weights = _object(group, "weights")
    refused[f"activation order {weights.get('actorder')!r}"] = weights.get("actorder") not in (None, False)
    refused[f"weight type {weights.get('type')!r}"] = weights.get("type", "int") != "int"
    refused[f"weight strategy {weights.get('strategy')!r}"] = weights.get("strategy", "group") != "group"
    refused["dynamic weights"] = weights.get("dynamic", False)
    for what, used in refused.items():
        if used:
            raise UserError(f"compressed-tensors with {what} is not supported")
    _check_int4("compressed-tensors", weights.get("num_bits"), weights.get("group_size"))
    zero_point = not weights.get("symmetric", True)
    return QuantConfig("pack-quantized", 4, weights["group_size"], zero_point)


def _check_int4(method: str, bits: object, group: object) -> None:
    if bits != 4:
        raise UserError(f"{method} with {bits} bits is not supported; only 4 is")
    if group not in GROUP_SIZES:
        raise UserError(f"{method} with group size {group} is not supported; 32, 64 and 128 are")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Llama or Qwen2 model."""

    family: Literal["llama", "qwen2"]
    vocab_size: int  # rows of the embedding; may be more than the tokenizer's
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    dtype: str  # one of DTYPES
    quant: QuantConfig | None
    eos_token_ids: tuple[int, ...]

    @staticmethod
    def from_dict(data: Json) -> ModelConfig:
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
        attention_bias, quant = bool(data.get("attention_bias")), _object(data, "quantization_config")
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
            rope=RopeConfig.from_dict(data),
            max_position_embeddings=_size(data, "max_position_embeddings", 2048),
            qkv_bias=family == "qwen2" or attention_bias,
            o_bias=family == "llama" and attention_bias,
            mlp_bias=family == "llama" and bool(data.get("mlp_bias")),
            tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
            dtype=_dtype(data),
            quant=QuantConfig.from_dict(quant) if quant else None,
            eos_token_ids=_ids(data, "eos_token_id"),
        )

    @staticmethod
    def from_dir(path: str | Path) -> ModelConfig:
        """Reads a checkpoint directory. generation_config.json, if any, names the tokens that end a text."""
        folder = Path(path)
        if not folder.is_dir():
            raise UserError(f"{folder}: no such directory")
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder}: no config.json; a Hugging Face model directory has one")
        data = _read(folder / "config.json")
        if (folder / "generation_config.json").is_file():
            stop = _read(folder / "generation_config.json").get("eos_token_id")
            data = data if stop is None else {**data, "eos_token_id": stop}
        try:
            return ModelConfig.from_dict(data)
        except UserError as error:
            raise UserError(f"{folder}/config.json: {error}") from None


def _read(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: not readable as JSON ({str(error).splitlines()[0]})") from None
    if not isinstance(data, dict):
        raise UserError(f"{file}: not a JSON object")
    return data


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


def _object(data: Json, key: str) -> Json:
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
