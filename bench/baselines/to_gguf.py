"""Converts a Llama checkpoint to GGUF, so that llama.cpp runs the same weights.

    python -m bench.baselines.to_gguf out.gguf [--model swiftspec/demo/target] [--type q8_0]

Types bf16 and q8_0 store every matrix in that type; int4 matrices are dequantised to bf16 first. Type q4_1 keeps the
codes of AutoAWQ's int4 matrices: (q - z) s = s q + m with m = -z s, which is rounded to fp16 once. Type q4_0 quantises
int4 matrices again, in blocks of 32 without a zero point. With q4_0 and q4_1, embedding and head become q8_0.

The vocabulary is written without the pre-tokenisation rule, so prompts must be given as token ids.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from torch import Tensor

from bench.baselines.checkpoint import Weights
from bench.data.heldout import DEMO
from swiftspec.errors import UserError
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.config import ModelConfig
from swiftspec.model.formats.int4 import Int4Weight, unpack_int4
from swiftspec.model.spec import RopeSpec, unknown_fields
from swiftspec.model.tensor_names import HF_NAMES

TYPES = ("bf16", "q8_0")  # for any checkpoint
INT4_TYPES = ("q4_0", "q4_1")  # for an int4 checkpoint
BLOCK = 32  # adjacent weights of a row that share a scale
STRIP_ROWS = 4096  # rows of a matrix converted at a time


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a GGUF file, with its shape before encoding."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    encode: Callable[[], np.ndarray]


def write_entries(writer: GGUFWriter, entries: list[Entry]) -> None:
    """Writes the metadata of `writer`, then the tensors, each of which is encoded when it is written."""
    for entry in entries:
        shape = gguf.quant_shape_to_byte_shape(entry.shape, entry.type)
        writer.add_tensor_info(entry.name, shape, np.dtype(np.uint8), math.prod(shape), entry.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in entries:
        writer.write_tensor_data(entry.encode())
    writer.close()


def write_gguf(model: Path, out: Path, kind: str) -> None:
    """Writes the checkpoint `model` as GGUF, with matrices of type `kind` (one of TYPES or INT4_TYPES) and vectors in
    float32. Encodes one tensor at a time, so memory does not grow with the file.

    Raises UserError on architectures other than Llama, on scaled RoPE, and on an int4 type for weights that are not
    int4.
    """
    config = read_config(model)
    mixer = config.spec.layer.attention
    plain = unknown_fields(config.spec) is None and mixer.rope == RopeSpec(mixer.rope.theta)
    if mixer.qkv_bias or not plain or config.names != HF_NAMES:
        raise UserError(f"{model}: GGUF export supports only Llama without biases and with unscaled RoPE")
    weights = Weights(model)
    if kind in INT4_TYPES and not weights.has_int4:
        raise UserError(f"{model}: {kind} requires int4 weights, but these are dense; use {' or '.join(TYPES)}")
    writer = GGUFWriter(out, "llama")
    _add_shape(writer, config)
    _add_vocabulary(writer, model, config.spec.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, len(config.spec.layers))
    entries = list[Entry]()
    for name in weights.names:
        theirs, type_ = names.get_name(name, (".weight", ".bias")), _type(weights, name, kind)
        assert theirs is not None, f"{name}: no tensor of a Llama model"
        encode = partial(encoded, weights, name, type_, _order(name, config))
        entries.append(Entry(theirs, weights.shape(name), type_, encode))
    write_entries(writer, entries)


def _type(weights: Weights, name: str, kind: str) -> GGMLQuantizationType:
    """Returns the type of the GGUF tensor for the checkpoint tensor `name`."""
    if len(weights.shape(name)) == 1:
        return GGMLQuantizationType.F32
    if kind in INT4_TYPES and not name.startswith("model.layers."):
        return GGMLQuantizationType.Q8_0
    return GGMLQuantizationType[kind.upper()]


def encoded(weights: Weights, name: str, type_: GGMLQuantizationType, order: Tensor | None) -> np.ndarray:
    """Returns the encoded tensor, with its rows in `order` if that is given."""
    if type_ == GGMLQuantizationType.Q4_1:
        return int4_blocks(weights, name, order).numpy()
    dense = _rows(weights.dense(name, torch.float32 if type_ == GGMLQuantizationType.F32 else torch.bfloat16), order)
    return np.concatenate([gguf.quantize(part.float().numpy(), type_) for part in dense.split(STRIP_ROWS)])


def int4_blocks(weights: Weights, name: str, order: Tensor | None) -> Tensor:
    """Returns the Q4_1 blocks [rows, blocks, bytes] of an int4 matrix, with unchanged codes: a scale, a minimum, and 16
    bytes of which byte i has weight i in its low half and weight i + 16 in its high half. `order`: of the rows."""
    weight = weights.int4(name)
    assert isinstance(weight, Int4Weight), f"{name}: expected an int4 matrix"
    scales = weight.scales.float()
    minima = -(unpack_int4(weight.zeros).float() * scales)
    per_group = weight.group_size // BLOCK
    low, high = _rows(unpack_int4(weight.packed).T, order).unflatten(1, (-1, BLOCK)).chunk(2, 2)
    halves = (_rows(t.T, order).repeat_interleave(per_group, 1).half().unsqueeze(2) for t in (scales, minima))
    return torch.cat((*(half.contiguous().view(torch.uint8) for half in halves), low | high << 4), 2)


def _rows(tensor: Tensor, order: Tensor | None) -> Tensor:
    return tensor if order is None else tensor[order]


def _order(name: str, config: ModelConfig) -> Tensor | None:
    """Returns the row order of a query or key projection for llama.cpp's RoPE, or None for other tensors.

    llama.cpp rotates pairs of adjacent rows, Hugging Face pairs of rows that are half a head apart.
    """
    mixer = config.spec.layer.attention
    heads = {"q_proj": mixer.num_heads, "k_proj": mixer.num_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return None
    return torch.arange(heads * mixer.head_dim).unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten()


def _add_shape(writer: GGUFWriter, config: ModelConfig) -> None:
    spec, mixer = config.spec, config.spec.layer.attention
    writer.add_block_count(len(spec.layers))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.layer.mlp.intermediate_size)
    writer.add_head_count(mixer.num_heads)
    writer.add_head_count_kv(mixer.num_kv_heads)
    writer.add_key_length(mixer.head_dim)
    writer.add_value_length(mixer.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_dimension_count(mixer.head_dim)
    writer.add_rope_freq_base(mixer.rope.theta)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _add_vocabulary(writer: GGUFWriter, model: Path, vocab_size: int) -> None:
    """Adds the byte-level BPE vocabulary in tokenizer.json. Unused ids get a name that does not occur in text."""
    data = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    tokens, types = [f"<|unused {i}|>" for i in range(vocab_size)], [TokenType.UNUSED] * vocab_size
    for token, index in data["model"]["vocab"].items():
        tokens[index], types[index] = token, TokenType.NORMAL
    for added in data["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]])


def main() -> None:
    """Parses the command line and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, default=DEMO / "target")
    parser.add_argument("--type", choices=TYPES + INT4_TYPES, default="bf16")
    args = parser.parse_args()
    try:
        write_gguf(args.model, args.out, args.type)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
