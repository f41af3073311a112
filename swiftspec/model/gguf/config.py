"""Configuration of a GGUF file: its metadata as a config.json, which the families of architectures/ read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from swiftspec.errors import UserError, truncated_repr
from swiftspec.model.config import ModelConfig
from swiftspec.model.config_json import parse_config
from swiftspec.model.formats.blocks import BLOCK_TYPES, GGUF_METHOD
from swiftspec.model.gguf.file import DENSE_BYTES, GgufFile
from swiftspec.model.tensor_names import TensorNames

GGUF_NAMES = TensorNames(
    embedding="token_embd", layers="blk", norm="output_norm", head="output", input_norm="attn_norm", q="attn_q",
    k="attn_k", v="attn_v", o="attn_output", q_norm="attn_q_norm", k_norm="attn_k_norm", mlp_norm="ffn_norm",
    gate="ffn_gate", up="ffn_up", down="ffn_down",
)  # fmt: skip
END_TOKENS = tuple(f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
ROPE_FREQS = "rope_freqs.weight"  # factors by which Llama 3.1 and later divide the frequencies of RoPE
ROPE_FREQ_TOLERANCE = 1e-4  # relative
DEFAULT_THETA, MAX_THETA = 10000.0, 1e15
MAX_HEAD_DIM = 1 << 14
LLAMA3_FACTORS = (8.0, 32.0)  # Llama 3.1 and 3.3; 3.2
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
FIELDS = {  # of config.json, by the name after the architecture's; a missing one is left out
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
CHANGES = (  # names of features that change what a model computes; 0, where they are off
    "expert_count", "attention.sliding_window", "attention.scale", "attention.clamp_kqv", "attn_logit_softcapping",
    "final_logit_softcapping", "embedding_scale", "residual_scale", "logit_scale", "attention.max_alibi_bias",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """A model family in GGUF.

    `family`: its entry in architectures/. `rotates_pairs`: whether the rows of queries and keys are stored for a RoPE
    that rotates adjacent rows, instead of rows that are half a head apart. `fields`: further fields, by the name after
    the architecture's, as in FIELDS. `names`: names of the tensors.
    """

    family: str
    rotates_pairs: bool = False
    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    names: TensorNames = GGUF_NAMES


GGUF_ARCHITECTURES = {
    "llama": GgufArchitecture("LlamaForCausalLM", rotates_pairs=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM"),
}


def gguf_config(file: GgufFile) -> ModelConfig:
    """Returns the configuration of a GGUF file. Raises UserError on unsupported features."""
    try:
        config = parse_config(config_object(file))
    except UserError as error:
        raise UserError(f"{file.path}: {error}") from None
    return replace(config, names=gguf_architecture(file).names)


def gguf_architecture(file: GgufFile) -> GgufArchitecture:
    """Returns the family of a GGUF file. Raises UserError if it is not supported."""
    name = file.metadata.get("general.architecture")
    found = GGUF_ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        *most, last = GGUF_ARCHITECTURES
        raise UserError(f"GGUF architecture {truncated_repr(name)} is not supported; {', '.join(most)} and {last} are")
    return found


def config_object(file: GgufFile) -> dict[str, Any]:
    """Returns the config.json that describes a GGUF file. Raises UserError on features that it cannot describe."""
    architecture, tensors = gguf_architecture(file), file.tensors
    name, names = str(file.metadata["general.architecture"]), architecture.names
    if _number(file.metadata.get("split.count")) > 1:
        raise UserError("one of several files of a model; merge them with `llama-gguf-split --merge`")
    own = {key.removeprefix(f"{name}."): value for key, value in file.metadata.items() if key.startswith(f"{name}.")}
    fields = {**FIELDS, **architecture.fields}
    for feature in CHANGES:
        if feature not in fields and _number(own.get(feature)) != 0:
            raise UserError(f"{name}.{feature} {truncated_repr(own[feature])} is not supported")
    data = {theirs: _scalar(own[ours], f"{name}.{ours}") for ours, theirs in fields.items() if ours in own}
    embedding = tensors.get(f"{names.embedding}.weight")
    if embedding is None:
        raise UserError(f"tensor {names.embedding}.weight is missing")
    ends = [file.metadata[key] for key in END_TOKENS if type(file.metadata.get(key)) is int]
    return {
        **data,
        "architectures": [architecture.family],
        "vocab_size": embedding.shape[0],
        "hidden_act": "silu",
        "attention_bias": f"{names.layer(0)}.{names.q}.bias" in tensors,
        "mlp_bias": f"{names.layer(0)}.{names.down}.bias" in tensors,
        "tie_word_embeddings": f"{names.head}.weight" not in tensors,
        "eos_token_id": [*dict.fromkeys(token for token in ends if token < embedding.shape[0])],
        "dtype": _dtype(file),
        "rope_scaling": _rope_scaling(file, own, data),
        "quantization_config": _quantization(file),
    }


def _number(value: Any) -> float:
    """Returns a value of the metadata as a number: 0 if it is missing, NaN if it is not a number."""
    if value is None:
        return 0.0
    return float(value) if isinstance(value, int | float) else math.nan


def _scalar(value: Any, key: str) -> Any:
    """Returns a value, which may be given for each layer. A number that is stored as float32 becomes the shortest
    decimal one that it stands for, such as 1e-06. Raises UserError if the layers differ."""
    if isinstance(value, float):
        return float(str(np.float32(value)))
    if not isinstance(value, np.ndarray):
        return value
    if len(value) == 0 or (value != value[0]).any():
        raise UserError(f"{key}: layers that differ in shape are not supported")
    return value[0].item()


def _dtype(file: GgufFile) -> str:
    """Returns the dtype in which the file's matrices are, bfloat16 for quantised ones."""
    types = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if types == {"F32"}:
        return "float32"
    return "float16" if types <= {"F16", "F32"} else "bfloat16"


def _quantization(file: GgufFile) -> dict[str, Any]:
    sizes = [BLOCK_TYPES[each.type].inputs for each in file.tensors.values() if each.type not in DENSE_BYTES]
    return {"quant_method": GGUF_METHOD, "block_inputs": max(sizes)} if sizes else {}


def _rope_scaling(file: GgufFile, own: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the frequency scaling of RoPE as config.json has it. Raises UserError if it is not supported."""
    hidden, heads, head_dim, theta = (
        _number(data.get(name)) for name in ("hidden_size", "num_attention_heads", "head_dim", "rope_theta")
    )
    width = head_dim or (hidden // heads if heads > 0 else 0)
    rotated = _number(own.get("rope.dimension_count")) or width
    if rotated != width:
        raise UserError(f"RoPE of {rotated:.0f} of {width:.0f} dimensions of a head is not supported")
    if ROPE_FREQS in file.tensors:
        return _llama3_rope(file, theta or DEFAULT_THETA, width)
    if _number(own.get("rope.scale_linear")) not in (0, 1):  # of old files
        raise UserError(f"rope.scale_linear {truncated_repr(own['rope.scale_linear'])} is not supported")
    kind = own.get("rope.scaling.type")
    if kind is None or (isinstance(kind, str) and kind == "none"):
        return {}
    if kind != "linear":
        raise UserError(f"RoPE type {truncated_repr(kind)} is not supported in GGUF files; none and linear are")
    return {"rope_type": kind, "factor": own.get("rope.scaling.factor", 1.0)}


def _llama3_rope(file: GgufFile, theta: float, head_dim: float) -> dict[str, Any]:
    """Returns the scaling of Llama 3 whose factors the file has as a tensor. Raises UserError if they are others."""
    tensor = file.tensors[ROPE_FREQS]
    if tensor.type == "F32" and tensor.shape == (head_dim // 2,) and head_dim <= MAX_HEAD_DIM and 1 < theta < MAX_THETA:
        with file.path.open("rb") as stream:
            stream.seek(tensor.offset)
            found = np.frombuffer(stream.read(tensor.nbytes), "<f4")
        for factor in LLAMA3_FACTORS:
            if found.shape == tensor.shape and np.allclose(
                found, _llama3_factors(theta, head_dim, factor), rtol=ROPE_FREQ_TOLERANCE, atol=0
            ):
                return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}
    raise UserError(f"the RoPE factors in tensor {ROPE_FREQS} are not those of Llama 3.1, 3.2 or 3.3")


def _llama3_factors(theta: float, head_dim: float, factor: float) -> np.ndarray:
    """Returns the divisors of the frequencies of RoPE [head_dim / 2], as llama.cpp's converter computes them."""
    low, high, original = LLAMA3_ROPE.values()
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (original / wavelength - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelength < original / high, 1.0, np.where(wavelength > original / low, factor, between))
