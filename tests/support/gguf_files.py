"""Tiny GGUF files of random models, and what they contain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from swiftspec.model.formats.blocks import FILE_TYPES, FLOAT4, BlockType
from swiftspec.model.gguf.families import GGUF_ARCHITECTURES

HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "IQ4_NL": (0,), "Q8_0": (0,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # byte positions  # fmt: skip
SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}  # whole super-blocks
# what convert_hf_to_gguf.py of llama.cpp does to the tensors of an architecture
PAIRS = ("llama", "smollm3", "granite", "mistral3", "arcee")  # rows of queries and keys for a RoPE of adjacent rows
NORMS_PLUS_ONE = ("gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next")
TILED = ("qwen35", "qwen35moe")  # value heads of delta layers: the first of each key head, then the second of each
RENAMED = {
    "dt_bias": "dt_proj.bias", "self_attn.sinks": "self_attn.sinks.weight",
    "e_score_correction_bias": "e_score_correction.bias",
}  # fmt: skip
Step = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]  # a conversion and its inverse
LETTERS = [chr(code) for code in range(33, 97)]  # 64 tokens


def random_blocks(kind: BlockType, rows: int, columns: int, noise: np.random.Generator) -> np.ndarray:
    """Rows of blocks [rows, bytes] uint8 with random codes, whose values are about as large as those of a model."""
    raw = noise.integers(0, 256, (rows, kind.row_bytes(columns)), dtype=np.uint8)
    blocks = raw.reshape(rows, -1, kind.bytes)
    size = 2.0 / columns**0.5 / 2 ** (kind.bits - 1) / (40 if kind.name.endswith("_K") else 1)
    if kind == FLOAT4:
        blocks[..., 0] = noise.integers(119, 124, blocks.shape[:2])  # exponents plus 127
    for at in HALVES.get(kind.name, ()):
        values = (size * noise.standard_normal(blocks.shape[:2])).astype(np.float16)
        blocks[..., at : at + 2] = values[..., None].view(np.uint8)
    return raw


def architecture_of(model: PreTrainedModel) -> str:
    """The name of a model's architecture in GGUF."""
    families = {one.family: name for name, one in GGUF_ARCHITECTURES.items()}
    families |= {"Olmo3ForCausalLM": "olmo2", "MixtralForCausalLM": "llama"}
    return families[type(model).__name__]


def gguf_name(architecture: str, layers: int, name: str) -> str:
    """The name in a GGUF file of a tensor of a Hugging Face checkpoint, as the package `gguf` has it."""
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    number = gguf.MODEL_ARCH.QWEN35MOE if "in_proj_" in name and "in_proj_ba" not in name else number
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
    architecture: str | None = None,
) -> dict[str, Tensor]:
    """Writes a model with matrices of the types that `type_of` gives for their names in Hugging Face; those in blocks
    get random values. Returns the values in float32, as a Hugging Face checkpoint has them. `architecture`: the text
    model of which this one is."""
    config, values = model.config, {}
    family = architecture or architecture_of(model)
    noise, writer = np.random.default_rng(0), GGUFWriter(path, family)
    add_shape(writer, config)
    add_rope(writer, config)
    FEATURES.get(family, lambda writer, config: None)(writer, config)
    add_vocabulary(writer, config.vocab_size)
    metadata(writer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        parts, join = single_projections(name, tensor, config)
        found = list[Tensor]()
        for part, single in parts.items():
            made = steps(family, part, single, config)
            value = single.float()
            for convert, _ in made:
                value = convert(value)
            dense = value.ndim == 1 or part.endswith(("bias", "conv1d.weight"))
            kind = "F32" if dense else type_of(name)
            enum = GGMLQuantizationType[kind]
            if kind in FILE_TYPES:
                raw = random_blocks(FILE_TYPES[kind], value[..., 0].numel(), value.shape[-1], noise)
                raw = raw.reshape(*value.shape[:-1], -1)
            else:
                raw = gguf.quantize(value.numpy(), enum)
            stored = torch.from_numpy(np.array(gguf.dequantize(raw, enum)))
            for _, inverse in reversed(made):
                stored = inverse(stored)
            found.append(stored)
            writer.add_tensor(gguf_name(family, config.num_hidden_layers, full_name(part)), raw, raw_dtype=enum)
        values[name] = join(found)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def full_name(name: str) -> str:
    """The name of a tensor as the package `gguf` knows it."""
    for ours, theirs in RENAMED.items():
        name = f"{name.removesuffix(ours)}{theirs}" if name.endswith(ours) else name
    return name if name.endswith((".weight", ".bias", "A_log")) else f"{name}.weight"


def single_projections(
    name: str, tensor: Tensor, config: Any
) -> tuple[dict[str, Tensor], Callable[[list[Tensor]], Tensor]]:
    """The tensors of a GGUF file for one of a model, by their names, and the inverse."""
    if name.endswith("in_proj_qkvz.weight"):
        order, rows = key_head_parts(config), 2 * config.linear_key_head_dim * config.linear_num_key_heads
        rows += config.linear_value_head_dim * config.linear_num_value_heads
        names = [name.replace("qkvz", part) for part in ("qkv", "z")]
        return dict(
            zip(names, tensor[order].split([rows, len(tensor) - rows]), strict=True)
        ), lambda parts: torch.empty_like(torch.cat(parts)).index_copy_(0, order, torch.cat(parts))
    if ".experts." not in name:
        return {name: tensor}, lambda parts: parts[0]
    bias, transposed = name.endswith("_bias"), config.model_type == "gpt_oss" and not name.endswith("_bias")
    whole = tensor.mT if transposed else tensor
    full = name.removesuffix("_bias") + (".bias" if bias else ".weight")
    if "gate_up_proj" not in name:
        return {full: whole}, lambda parts: parts[0].mT if transposed else parts[0]
    names = [full.replace("gate_up_proj", half) for half in ("gate_proj", "up_proj")]
    if config.model_type != "gpt_oss":
        return dict(zip(names, whole.chunk(2, 1), strict=True)), lambda parts: torch.cat(parts, 1)
    halves = dict(zip(names, (whole[:, ::2], whole[:, 1::2]), strict=True))

    def alternating(parts: list[Tensor]) -> Tensor:
        both = torch.stack(parts, 2).flatten(1, 2)
        return both.mT if transposed else both

    return halves, alternating


def key_head_parts(config: Any) -> Tensor:
    """The rows of queries, keys, values and gate of a Qwen3-Next, which has them ordered by key head."""
    keys = config.linear_key_head_dim
    values = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    sizes = [keys, keys, values, values]
    rows = torch.arange(config.linear_num_key_heads * sum(sizes)).view(config.linear_num_key_heads, -1)
    return torch.cat([part.flatten() for part in rows.split(sizes, 1)])


def reordered(order: Tensor, dim: int = 0) -> Step:
    return (
        lambda value: value.index_select(dim, order),
        lambda value: torch.empty_like(value).index_copy_(dim, order, value),
    )


def steps(family: str, name: str, tensor: Tensor, config: Any) -> list[Step]:
    """What the converter does to a tensor."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    module, made = name.split(".")[-2], list[Step]()
    if family in PAIRS and module in heads:
        made.append(reordered(rotated_pairs(len(tensor), heads[module])))
    if family in NORMS_PLUS_ONE and name.endswith("norm.weight") and "linear_attn" not in name:
        made.append((lambda value: value + 1, lambda value: value - 1))
    if name.endswith(("conv1d.weight", "shared_expert_gate.weight")):
        made.append((lambda value: value.squeeze(), lambda value: value.view(tensor.shape)))
    if name.endswith("A_log"):
        made.append((lambda value: -value.exp(), lambda value: (-value.double()).log()))
    if family in TILED and "linear_attn" in name:
        made += tiled_heads(name, tensor, config)
    return made


def tiled_heads(name: str, tensor: Tensor, config: Any) -> list[Step]:
    """The new order of the value heads in a tensor of a delta layer, the output projection of which has them as
    columns."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    keys, values, size = (
        getattr(config, f"linear_{part}") for part in ("num_key_heads", "num_value_heads", "value_head_dim")
    )
    width = 1 if module in ("in_proj_a", "in_proj_b", "A_log", "dt_bias") else size
    order = torch.arange(values * width).view(keys, values // keys, width).transpose(0, 1).flatten()
    if module in ("in_proj_qkv", "conv1d"):
        first = 2 * keys * config.linear_key_head_dim
        order = torch.cat((torch.arange(first), first + order))
    return [] if module == "norm" else [reordered(order, int(module == "out_proj"))]


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
    if getattr(config, "intermediate_size", None) is not None:
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


def _experts(writer: GGUFWriter, config: Any) -> None:
    """Of Mixtral and OLMoE; a Llama has none."""
    if hasattr(config, "num_experts_per_tok"):
        writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)


def _gemma2(writer: GGUFWriter, config: Any) -> None:
    _windows(writer, config)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _shared_expert(writer: GGUFWriter, config: Any) -> None:
    _qwen3moe(writer, config)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _gpt_oss(writer: GGUFWriter, config: Any) -> None:
    _windows(writer, config)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.intermediate_size)


def _glm4moe(writer: GGUFWriter, config: Any) -> None:
    """Without the layer of multi-token prediction, which such a file has after the others."""
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)


def _delta(writer: GGUFWriter, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    kinds = [kind == "linear_attention" for kind in config.layer_types]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", kinds)
    writer.add_full_attention_interval(4)
    if writer.arch != "qwen3next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    if writer.arch != "qwen35":
        _shared_expert(writer, config)


# what convert_hf_to_gguf.py of llama.cpp writes for an architecture in addition
FEATURES: dict[str, Callable[[GGUFWriter, Any], None]] = {
    "qwen3moe": _qwen3moe, "qwen2moe": _shared_expert, "gpt-oss": _gpt_oss, "qwen35": _delta, "qwen35moe": _delta,
    "qwen3next": _delta, "gemma3": _gemma3, "phi3": _phi3, "granite": _granite, "olmo2": _olmo, "mistral3": _mistral3,
    "llama": _experts, "olmoe": _experts, "gemma2": _gemma2, "glm4moe": _glm4moe,
    "qwen2vl": lambda writer, config: writer.add_rope_dimension_sections([1, 2, 1, 0]),
    "qwen3vl": lambda writer, config: writer.add_rope_dimension_sections([4, 2, 2, 0]),
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
