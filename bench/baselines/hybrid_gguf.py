"""Converts a Qwen3.5 checkpoint of bench/random_pairs.py to GGUF, so that llama.cpp runs the same weights.

    python -m bench.baselines.hybrid_gguf out.gguf --model DIR [--type q4_1]

Both types keep the codes of AutoAWQ's int4 matrices. Type q4_1 has a minimum per block; q4_0 omits it, so all zero
points must be 8. Embedding and gates become q8_0; all other tensors are in float32.

The vocabulary has placeholder names, so prompts must be given as token ids.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from torch import Tensor

from bench.baselines.checkpoint import Weights
from bench.baselines.to_gguf import BLOCK, INT4_TYPES, Entry, encoded, int4_blocks, write_entries
from swiftspec.errors import UserError

MROPE_SECTIONS = [11, 11, 10, 0]  # pairs of dimensions for time, height and width; equal for text
MINIMUM = slice(2, 4)  # the bytes of a Q4_1 block that Q4_0 lacks


def write_gguf(model: Path, out: Path, kind: str) -> None:
    """Writes the checkpoint `model` as GGUF of architecture qwen35, with int4 matrices of type `kind` (one of
    INT4_TYPES).

    Raises UserError on other architectures, and on zero points other than 8 with q4_0.
    """
    fields = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if fields["architectures"] != ["Qwen3_5ForCausalLM"]:
        raise UserError(f"{model}: expected Qwen3_5ForCausalLM, found {', '.join(fields['architectures'])}")
    writer, weights = GGUFWriter(out, "qwen35"), Weights(model)
    _add_shape(writer, fields)
    _add_vocabulary(writer, fields["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35, fields["num_hidden_layers"])
    entries = list[Entry]()
    for name in weights.names:
        theirs = names.get_name(name.replace("dt_bias", "dt_proj.bias"), (".weight", ".bias"))
        assert theirs is not None, f"{name}: no tensor of a Qwen3.5 model"
        shape = tuple(size for size in weights.shape(name) if size != 1)
        type_, encode = _encoder(weights, name, kind, heads_order(name, fields))
        entries.append(Entry(theirs, shape, type_, encode))
    write_entries(writer, entries)


def heads_order(name: str, fields: dict[str, Any]) -> Tensor | None:
    """Returns the order in which llama.cpp has the rows of a tensor of a delta layer, or the columns of its output
    projection. Returns None for other tensors, and if each key head has one value head.

    Hugging Face stores the value heads of a key head next to each other; llama.cpp stores the first value head of each
    key head, then the second of each.
    """
    module = name.removesuffix(".weight").rpartition(".")[2]
    keys, values, size = (fields[f"linear_{part}"] for part in ("num_key_heads", "num_value_heads", "value_head_dim"))
    sizes = dict.fromkeys(("in_proj_a", "in_proj_b", "A_log", "dt_bias"), 1)
    sizes |= dict.fromkeys(("in_proj_qkv", "in_proj_z", "conv1d", "out_proj"), size)
    if "linear_attn" not in name or module not in sizes or keys == values:
        return None
    order = torch.arange(values * sizes[module]).unflatten(0, (keys, values // keys, -1)).transpose(0, 1).flatten()
    first = 2 * keys * fields["linear_key_head_dim"] if module in ("in_proj_qkv", "conv1d") else 0
    return torch.cat((torch.arange(first), first + order))


def _encoder(
    weights: Weights, name: str, kind: str, order: Tensor | None
) -> tuple[GGMLQuantizationType, Callable[[], np.ndarray]]:
    """Returns the type of the GGUF tensor for the checkpoint tensor `name`, and a function that encodes it."""
    if weights.is_int4(name):
        return GGMLQuantizationType[kind.upper()], partial(_int4, weights, name, kind, order)
    if len(weights.shape(name)) == 2:
        type_ = GGMLQuantizationType.Q8_0
        return type_, partial(encoded, weights, name, type_, order)
    return GGMLQuantizationType.F32, partial(_vector, weights, name, order)


def _int4(weights: Weights, name: str, kind: str, order: Tensor | None) -> np.ndarray:
    """Returns the blocks of an int4 matrix. `order`: of the rows, or of an output projection's columns."""
    if order is not None and "out_proj" in name:
        blocks = int4_blocks(weights, name, None)[:, order[::BLOCK] // BLOCK]  # whole blocks move
    else:
        blocks = int4_blocks(weights, name, order)
    if kind == "q4_1":
        return blocks.numpy()
    scale, least = blocks[..., : MINIMUM.stop].contiguous().view(torch.float16).unbind(-1)
    if not torch.equal(least, -8 * scale):
        raise UserError(f"{name}: q4_0 requires zero points of 8")
    return torch.cat((blocks[..., : MINIMUM.start], blocks[..., MINIMUM.stop :]), 2).numpy()


def _vector(weights: Weights, name: str, order: Tensor | None) -> np.ndarray:
    """Returns a norm, the filters of the convolution, or the parameters of a delta layer's decay, in float32.

    llama.cpp has the norms with their unit offset, and the decay rates instead of their negated logarithms.
    """
    tensor = weights.dense(name, torch.float32).squeeze()
    if name.endswith("norm.weight") and "linear_attn" not in name:
        tensor = tensor + 1
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    return (tensor if order is None else tensor[order]).contiguous().numpy()


def _add_shape(writer: GGUFWriter, fields: dict[str, Any]) -> None:
    rope = fields["rope_parameters"]
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_key_length(fields["head_dim"])
    writer.add_value_length(fields["head_dim"])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    writer.add_rope_dimension_count(int(fields["head_dim"] * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections(MROPE_SECTIONS)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_full_attention_interval(fields["layer_types"].index("full_attention") + 1)
    writer.add_ssm_conv_kernel(fields["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(fields["linear_key_head_dim"])
    writer.add_ssm_group_count(fields["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(fields["linear_num_value_heads"])
    writer.add_ssm_inner_size(fields["linear_value_head_dim"] * fields["linear_num_value_heads"])
    writer.add_vocab_size(fields["vocab_size"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _add_vocabulary(writer: GGUFWriter, vocab_size: int) -> None:
    """Adds placeholder names and one merge, since llama.cpp loads no BPE vocabulary without names and merges."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"<{index}>" for index in range(vocab_size)])
    writer.add_token_types([TokenType.NORMAL] * vocab_size)
    writer.add_token_merges(["< 0"])


def main() -> None:
    """Parses the command line and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--type", choices=INT4_TYPES, default="q4_1")
    args = parser.parse_args()
    try:
        write_gguf(args.model, args.out, args.type)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
