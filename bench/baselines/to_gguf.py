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
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.baselines.checkpoint import Weights
from bench.baselines.gguf_file import BLOCK, Entry, Fact, encoded, q4_1, write_file
from bench.data.heldout import DEMO
from swiftspec.errors import UserError
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.config import ModelConfig
from swiftspec.model.formats.int4 import Int4Weight, unpack_int4

TYPES = ("bf16", "q8_0")  # for any checkpoint
INT4_TYPES = ("q4_0", "q4_1")  # for an int4 checkpoint
NORMAL, CONTROL, UNUSED = 1, 3, 5  # GGUF's token types
PLACES = {  # Hugging Face names and GGUF names
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(model: Path, out: Path, kind: str) -> None:
    """Writes the checkpoint `model` as GGUF, with matrices of type `kind` (one of TYPES or INT4_TYPES) and vectors in
    float32.

    Raises UserError on architectures other than Llama, on scaled RoPE, and on an int4 type for weights that are not
    int4.
    """
    config = read_config(model)
    if config.family != "llama" or config.rope.kind != "default":
        raise UserError(f"{model}: GGUF export supports only Llama with unscaled RoPE")
    weights = Weights(model)
    if kind in INT4_TYPES and not weights.has_int4:
        raise UserError(f"{model}: {kind} requires int4 weights, but these are dense; use {' or '.join(TYPES)}")
    entries = [_entry(weights, name, config, kind) for name in weights.names]
    write_file(out, {"general.architecture": "llama", **_shape(config), **_tokens(model, config.vocab_size)}, entries)


def _entry(weights: Weights, name: str, config: ModelConfig, kind: str) -> Entry:
    """Returns the GGUF tensor for the checkpoint tensor `name`."""
    rows, shape = _order(name, config), weights.shape(name)
    module, _, part = name.rpartition(".")
    layer = module.split(".")[2] if module.startswith("model.layers.") else None
    place = PLACES[module if layer is None else module.split(".", 3)[3]]
    theirs = f"{place}.{part}" if layer is None else f"blk.{layer}.{place}.{part}"
    if len(shape) == 1:
        return Entry(theirs, shape, "f32", lambda: encoded(_rows(weights.dense(name, torch.float32), rows), "f32"))
    if kind == "q4_1" and layer is not None:
        return Entry(theirs, shape, kind, partial(_as_they_are, weights, name, rows))
    stored = "q8_0" if kind in INT4_TYPES and layer is None else kind
    return Entry(theirs, shape, stored, lambda: encoded(_rows(weights.dense(name, torch.bfloat16), rows), stored))


def _as_they_are(weights: Weights, name: str, rows: Tensor | None) -> Iterator[Tensor]:
    """Yields the Q4_1 blocks of an int4 matrix, with unchanged codes."""
    weight = weights.int4(name)
    assert isinstance(weight, Int4Weight), f"{name}: expected an int4 matrix"
    scales = weight.scales.float()
    minima = -(unpack_int4(weight.zeros).float() * scales)
    per_group = weight.group_size // BLOCK
    blocks = [_rows(t.T, rows).repeat_interleave(per_group, 1) for t in (scales, minima)]
    yield q4_1(_rows(unpack_int4(weight.packed).T, rows), *blocks)


def _rows(tensor: Tensor, order: Tensor | None) -> Tensor:
    return tensor if order is None else tensor[order]


def _order(name: str, config: ModelConfig) -> Tensor | None:
    """Returns the row order of a query or key projection for llama.cpp's RoPE, or None for other tensors.

    llama.cpp rotates pairs of adjacent rows, Hugging Face pairs of rows that are half a head apart.
    """
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return None
    return torch.arange(heads * config.head_dim).unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten()


def _shape(config: ModelConfig) -> dict[str, Fact]:
    return {
        "llama.block_count": config.num_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": float(config.rope.theta),
        "llama.vocab_size": config.vocab_size,
        "general.quantization_version": 2,
    }


def _tokens(model: Path, vocab_size: int) -> dict[str, Fact]:
    """Returns the metadata of the byte-level BPE vocabulary in tokenizer.json. Unused ids get a name that does not
    occur in text."""
    data = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    tokens, types = [f"<|unused {i}|>" for i in range(vocab_size)], [UNUSED] * vocab_size
    for token, index in data["model"]["vocab"].items():
        tokens[index], types[index] = token, NORMAL
    for added in data["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], CONTROL
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]],
    }


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
