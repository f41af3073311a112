"""Writes the trained draft as a GGUF file with matrices in Q4_0 and the tokenizer of the target.

python -m tools.smollm2_draft.export SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from swiftspec.startup.built_in_models import SMOLLM2_DRAFT

TYPE = gguf.GGMLQuantizationType.Q4_0


def interleave_heads(weights: Tensor, heads: int) -> Tensor:
    """Returns rows of queries or keys in the order of GGUF's llama, whose RoPE rotates adjacent rows."""
    return weights.view(heads, 2, -1, weights.shape[-1]).transpose(1, 2).reshape(weights.shape)


def write_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_name("Draft for SmolLM2-135M-Instruct")
    writer.add_license("apache-2.0")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)


def copy_tokenizer(writer: gguf.GGUFWriter, target: gguf.GGUFReader) -> None:
    """Copies the metadata of the target's tokenizer, except the chat template."""
    for name, field in target.fields.items():
        if name.startswith("tokenizer.ggml."):
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, inner[-1] if inner else None)


def write_tensors(writer: gguf.GGUFWriter, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in weights.items():
        if name == "lm_head.weight":
            continue  # the embedding
        module = name.split(".")[-2]
        data = interleave_heads(tensor, heads[module]) if module in heads else tensor
        theirs = names.get_name(name, try_suffixes=(".weight",))
        assert theirs is not None, name
        if data.ndim == 2:
            writer.add_tensor(theirs, gguf.quants.quantize(data.numpy(), TYPE), raw_dtype=TYPE)
        else:
            writer.add_tensor(theirs, data.numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", type=Path, help="GGUF file of SmolLM2-135M-Instruct")
    parser.add_argument("--draft", type=Path, default=Path("build/smollm2_draft/draft.pt"), help="trained weights")
    parser.add_argument("--out", type=Path, default=SMOLLM2_DRAFT, help="output file")
    args = parser.parse_args()
    draft = torch.load(args.draft, weights_only=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(args.out, "llama")
    write_metadata(writer, draft["config"])
    copy_tokenizer(writer, gguf.GGUFReader(args.target))
    write_tensors(writer, draft["config"], draft["weights"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
