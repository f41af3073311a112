"""A Llama checkpoint as GGUF, so that llama.cpp runs the same weights: int4 ones are dequantised to bf16 first.

    python -m bench.rivals.to_gguf out.gguf [--model swiftspec/demo/target] [--type q8_0]

The tokens are written too, without the rule that splits text into words: the file is for token ids, not for chats.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.data.heldout import DEMO
from bench.rivals.engines import dense_state
from swiftspec.errors import UserError
from swiftspec.model.config import ModelConfig
from swiftspec.model.files import read_config

TYPES = ("bf16", "q8_0")


def write_gguf(model: Path, out: Path, kind: str) -> None:
    """Writes a checkpoint's matrices as `kind`, one of TYPES, and everything else in float32.

    q8_0 is quantised from the bf16 values. Raises UserError on what this does not translate: other architectures than
    Llama, and stretched RoPE.
    """
    import gguf  # pyright: ignore[reportMissingImports] # optional

    config = read_config(model)
    if config.family != "llama" or config.rope.kind != "default":
        raise UserError(f"{model}: only Llama with plain RoPE is written as GGUF; choose such a model")
    writer = gguf.GGUFWriter(out, "llama")
    _add_shape(writer, config)
    _add_tokens(writer, model, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    for name, tensor in dense_state(model, torch.bfloat16).items():
        stored = gguf.GGMLQuantizationType[kind.upper() if tensor.dim() == 2 else "F32"]
        data = gguf.quants.quantize(_interleaved(name, tensor, config).float().numpy(), stored)
        theirs = names.get_name(name, (".weight", ".bias"))
        assert theirs is not None, f"{name}: no such tensor in a Llama"
        writer.add_tensor(theirs, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """The rows of queries and keys as llama.cpp's RoPE wants them: the two that are rotated together are neighbours,
    where Hugging Face keeps them half a head apart."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _add_shape(writer: Any, config: ModelConfig) -> None:
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_vocab_size(config.vocab_size)


def _add_tokens(writer: Any, model: Path, vocab_size: int) -> None:
    """The byte-level BPE of tokenizer.json; ids that it does not use get a name that no text contains."""
    from gguf import TokenType  # pyright: ignore[reportMissingImports] # optional

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
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, default=DEMO / "target")
    parser.add_argument("--type", choices=TYPES, default="bf16")
    args = parser.parse_args()
    write_gguf(args.model, args.out, args.type)


if __name__ == "__main__":
    main()
