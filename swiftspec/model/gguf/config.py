"""Configuration of a GGUF file: its metadata as a config.json, which the families of architectures/ read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from swiftspec.errors import UserError
from swiftspec.file_io import damage_reported
from swiftspec.model.config import ModelConfig
from swiftspec.model.config_json import parse_config
from swiftspec.model.formats.blocks import FILE_TYPES, GGUF_METHOD
from swiftspec.model.gguf.families import MAX_LAYERS, MTP_LAYERS, GgufArchitecture, gguf_architecture
from swiftspec.model.gguf.fields import GgufFields
from swiftspec.model.gguf.file import DENSE_BYTES, GgufFile
from swiftspec.model.gguf.rope import rope_parameters

END_TOKENS = tuple(f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
FIELDS = {  # of config.json, by the name after the architecture's
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
CHANGES = (  # names of features that change what a model computes; 0, where they are off
    "expert_count", "expert_weights_scale", "expert_group_count", "attention.sliding_window", "attention.scale",
    "attention.clamp_kqv", "attn_logit_softcapping", "final_logit_softcapping", "embedding_scale", "residual_scale",
    "logit_scale", "attention.max_alibi_bias", "attention.temperature_scale", "rope.dimension_sections",
    "rope.scaling.alpha", MTP_LAYERS,
)  # fmt: skip


def gguf_config(file: GgufFile) -> ModelConfig:
    """Returns the configuration of a GGUF file. Raises UserError on unsupported features."""
    with damage_reported(file.path):
        config = parse_config(config_object(file))
    return replace(config, names=gguf_architecture(file).names)


def config_object(file: GgufFile) -> dict[str, Any]:
    """Returns the config.json that describes a GGUF file. Raises UserError on features that it cannot describe. What
    the metadata lack is null, so that it has llama.cpp's default instead of the family's."""
    architecture, fields, tensors = gguf_architecture(file), GgufFields.of(file), file.tensors
    names = architecture.names
    _refuse_unsupported(file, fields, architecture)
    embedding = tensors.get(f"{names.embedding}.weight")
    if embedding is None:
        raise UserError(f"tensor {names.embedding}.weight is missing")
    data = {theirs: fields.scalar(ours) for ours, theirs in FIELDS.items()}
    for ours, theirs in architecture.features.items():
        data[theirs] = None if fields.is_off(ours) else fields.scalar(ours)
    rope = rope_parameters(file, fields.head_dim(), partial=architecture.partial_rope)
    bias = f"{names.layer(0)}.{names.q}.bias" in tensors
    ends = [file.metadata[key] for key in END_TOKENS if type(file.metadata.get(key)) is int]
    return {
        **data,
        "architectures": [architecture.family],
        "vocab_size": embedding.shape[0],
        "hidden_act": "silu",
        "attention_bias": bias,
        "qkv_bias": bias,
        "use_qk_norm": f"{names.layer(0)}.{names.q_norm}.weight" in tensors,
        "mlp_bias": f"{names.layer(0)}.{names.down}.bias" in tensors,
        "tie_word_embeddings": f"{names.head}.weight" not in tensors,
        "eos_token_id": [*dict.fromkeys(token for token in ends if token < embedding.shape[0])],
        "dtype": _dtype(file),
        "rope_parameters": rope,
        "quantization_config": _quantization(file),
        **architecture.read(fields, rope),
    }


def extra_layers(file: GgufFile, count: int) -> range:
    """Returns the indices of the layers that follow the `count` layers of the model: those of multi-token prediction,
    which are not used. Raises UserError if their number is invalid."""
    fields = GgufFields.of(file)
    extra = 0 if fields.is_off(MTP_LAYERS) else fields.number(MTP_LAYERS)
    if not 0 <= extra <= MAX_LAYERS or extra % 1:
        raise fields.unsupported(MTP_LAYERS)
    return range(count, count + int(extra))


def _refuse_unsupported(file: GgufFile, fields: GgufFields, architecture: GgufArchitecture) -> None:
    count = file.metadata.get("split.count")
    if isinstance(count, int | float) and count > 1:
        raise UserError("one of several files of a model; merge them with `llama-gguf-split --merge`")
    for feature in CHANGES:
        if feature not in (*architecture.features, *architecture.known) and not fields.is_off(feature):
            raise fields.unsupported(feature)
    if fields.values.get("attention.causal") is False:
        raise fields.unsupported("attention.causal")


def _dtype(file: GgufFile) -> str:
    """Returns the dtype in which the file's matrices are, bfloat16 for quantised ones."""
    types = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if types == {"F32"}:
        return "float32"
    return "float16" if types <= {"F16", "F32"} else "bfloat16"


def _quantization(file: GgufFile) -> dict[str, Any]:
    sizes = [FILE_TYPES[each.type].inputs for each in file.tensors.values() if each.type not in DENSE_BYTES]
    return {"quant_method": GGUF_METHOD, "block_inputs": max(sizes)} if sizes else {}
