"""Tiny GGUF files of random models, and what they contain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from swiftspec.model.formats.blocks import BLOCK_TYPES, BlockType
from swiftspec.model.gguf.families import GGUF_ARCHITECTURES

HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # byte positions
SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}  # whole super-blocks
# what convert_hf_to_gguf.py of llama.cpp does to the tensors of an architecture
PAIRS = ("llama", "smollm3", "granite", "mistral3")  # rows of queries and keys for a RoPE of adjacent rows
NORMS_PLUS_ONE = ("gemma3",)
LETTERS = [chr(code) for code in range(33, 97)]  # 64 tokens


def random_blocks(kind: BlockType, rows: int, columns: int, noise: np.random.Generator) -> np.ndarray:
    """Rows of blocks [rows, bytes] uint8 with random codes, whose values are about as large as those of a model."""
    raw = noise.integers(0, 256, (rows, kind.row_bytes(columns)), dtype=np.uint8)
    blocks = raw.reshape(rows, -1, kind.bytes)
    size = 2.0 / columns**0.5 / 2 ** (kind.bits - 1) / (40 if kind.name.endswith("_K") else 1)
    for at in HALVES[kind.name]:
        values = (size * noise.standard_normal(blocks.shape[:2])).astype(np.float16)
        blocks[..., at : at + 2] = values[..., None].view(np.uint8)
    return raw


def architecture_of(model: PreTrainedModel) -> str:
    """The name of a model's architecture in GGUF."""
    families = {one.family: name for name, one in GGUF_ARCHITECTURES.items()} | {"Olmo3ForCausalLM": "olmo2"}
    return families[type(model).__name__]


def gguf_name(architecture: str, layers: int, name: str) -> str:
    """The name in a GGUF file of a tensor of a Hugging Face checkpoint, as the package `gguf` has it."""
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    found = gguf.get_tensor_name_map(number, layers).get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def rotated_pairs(rows: int, heads: int) -> Tensor:
    """The order in which a GGUF file of a Llama has the rows of queries or keys."""
    return torch.arange(rows).view(heads, 2, -1).transpose(1, 2).flatten()


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    type_of: Callable[[str], str] = lambda name: "F32",
    metadata: Callable[[GGUFWriter], object] = lambda writer: None,
) -> dict[str, Tensor]:
    """Writes a model with matrices of the types that `type_of` gives for their names in Hugging Face; those in blocks
    get random values. Returns the values in float32, as a Hugging Face checkpoint has them."""
    config, values = model.config, {}
    family = architecture_of(model)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    noise, writer = np.random.default_rng(0), GGUFWriter(path, family)
    add_shape(writer, config)
    add_rope(writer, config)
    FEATURES.get(family, lambda writer, config: None)(writer, config)
    add_vocabulary(writer, config.vocab_size)
    metadata(writer)
    for name, tensor in single_projections(model.state_dict()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        module, value = name.split(".")[-2], tensor.float()
        order = None
        if family in PAIRS and module in heads:
            order = rotated_pairs(len(value), heads[module])
            value = value[order]
        shift = int(family in NORMS_PLUS_ONE and value.ndim == 1)
        value, kind = value + shift, type_of(name) if value.ndim > 1 else "F32"
        enum = GGMLQuantizationType[kind]
        if kind in BLOCK_TYPES:
            raw = random_blocks(BLOCK_TYPES[kind], value[..., 0].numel(), value.shape[-1], noise)
            raw = raw.reshape(*value.shape[:-1], -1)
        else:
            raw = gguf.quantize(value.numpy(), enum)
        stored = torch.from_numpy(np.array(gguf.dequantize(raw, enum))) - shift
        values[name] = stored if order is None else torch.empty_like(stored).index_copy_(0, order, stored)
        full = name if name.endswith((".weight", ".bias")) else f"{name}.weight"
        writer.add_tensor(gguf_name(family, config.num_hidden_layers, full), raw, raw_dtype=enum)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return joined_projections(values)


def single_projections(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model, with gate and up of all experts as two."""
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            for half, part in zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True):
                yield name.replace("gate_up_proj", half), part
        else:
            yield name, tensor


def joined_projections(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `single_projections`."""
    joined = dict[str, Tensor]()
    for name, value in values.items():
        if name.endswith("experts.gate_proj"):
            joined[name.replace("gate_proj", "gate_up_proj")] = torch.cat(
                [value, values[name.replace("gate_proj", "up_proj")]], 1
            )
        elif not name.endswith("experts.up_proj"):
            joined[name] = value
    return joined


def write_twin(folder: Path, model: PreTrainedModel, values: Mapping[str, Tensor]) -> Path:
    """Writes a Hugging Face checkpoint in float32 with the values of a GGUF file."""
    folder.mkdir()
    model.config.save_pretrained(folder)
    save_file({name: value.contiguous() for name, value in values.items()}, folder / "model.safetensors")
    return folder


def add_shape(writer: GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def full_rope(config: Any) -> dict[str, Any]:
    """The parameters of RoPE, those of the layers with full attention if the kinds of layers differ."""
    return config.rope_parameters.get("full_attention", config.rope_parameters)


def add_rope(writer: GGUFWriter, config: Any) -> None:
    rope = full_rope(config)
    writer.add_rope_dimension_count(int(config.head_dim * rope.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def _windows(writer: GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window or 0)


def _gemma3(writer: GGUFWriter, config: Any) -> None:
    """With the pattern, which the converter writes only for other families than Gemma 3, because the usual one has six
    layers."""
    _windows(writer, config)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _phi3(writer: GGUFWriter, config: Any) -> None:
    """The converter does not name the type of RoPE."""
    _windows(writer, config)
    rope = full_rope(config)
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    writer.add_rope_scaling_attn_factors(rope["attention_factor"])
    for name in ("long", "short"):
        writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))


def _granite(writer: GGUFWriter, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _olmo(writer: GGUFWriter, config: Any) -> None:
    if config.model_type == "olmo3":
        _windows(writer, config)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def _mistral3(writer: GGUFWriter, config: Any) -> None:
    writer.add_rope_scaling_yarn_log_mul(config.rope_parameters["mscale_all_dim"])
    writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])


def _qwen3moe(writer: GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)


# what convert_hf_to_gguf.py of llama.cpp writes for an architecture in addition
FEATURES: dict[str, Callable[[GGUFWriter, Any], None]] = {
    "qwen3moe": _qwen3moe, "gemma3": _gemma3, "phi3": _phi3, "granite": _granite, "olmo2": _olmo, "mistral3": _mistral3,
}  # fmt: skip


def add_vocabulary(writer: GGUFWriter, size: int) -> None:
    """A byte-level vocabulary of single characters and one merge, with <s> and </s> as tokens 1 and 2."""
    tokens = [*LETTERS[:size]]
    tokens[1], tokens[2], tokens[-1] = "<s>", "</s>", "AB"
    types = [TokenType.NORMAL] * len(tokens)
    types[1] = types[2] = TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
