"""Writes a trained head as an EAGLE-3 checkpoint: model.safetensors and config.json.

    python -m tools.smollm2_head.export [--int4]

With --int4 the matrices of the layer and of the LM head are in the format pack-quantized of compressed-tensors, in
groups of 32, with the values that the last part of the training rounds to. The embedding is the target's and not in the
file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from swiftspec.model.formats.int4 import pack_int4
from tools.smollm2_draft.q4_0 import BLOCK, codes_q4_0

QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "ignore": ["fc"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "format": "pack-quantized",
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": BLOCK},
        }
    },
}  # fmt: skip


def config_of(head: dict[str, Any], *, int4: bool) -> dict[str, Any]:
    """Returns the content of config.json."""
    shape = dict(head["shape"])
    del shape["target_layers"]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "max_position_embeddings": 8192, "hidden_act": "silu", "tie_word_embeddings": False, "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in head["hidden_layers"]], **shape,
    }  # fmt: skip
    return {**config, "quantization_config": QUANTIZATION} if int4 else config


def vocabulary(token_ids: Tensor, vocab: int) -> dict[str, Tensor]:
    """Returns the tensors that map the draft vocabulary: d2t, offsets from rows of the LM head to ids, and t2d."""
    return {
        "d2t": token_ids - torch.arange(len(token_ids)),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill_(0, token_ids, True),
    }


def pack_q4_0(weight: Tensor) -> dict[str, Tensor]:
    """Returns the tensors of a matrix in the format pack-quantized, by the last part of their names."""
    codes, scales = codes_q4_0(weight)
    return {
        "weight_packed": pack_int4((codes + 8).to(torch.uint8).view(weight.shape)),
        "weight_scale": scales.view(len(weight), -1).half(),
        "weight_shape": torch.tensor(weight.shape),
    }


def tensors_of(head: dict[str, Any], *, int4: bool, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Returns the content of model.safetensors. `dtype`: of the tensors that are not int4."""
    tensors = vocabulary(head["token_ids"], head["shape"]["vocab_size"])
    for name, weight in head["weights"].items():
        if int4 and weight.ndim == 2 and name != "fc.weight":
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{part}": tensor for part, tensor in pack_q4_0(weight).items()}
        else:
            tensors[name] = weight.to(dtype)
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--head", type=Path, default=Path("build/smollm2_head/head.pt"), help="trained weights")
    parser.add_argument("--out", type=Path, default=Path("build/smollm2_head/checkpoint"), help="output folder")
    parser.add_argument("--int4", action="store_true", help="int4 matrices instead of bfloat16")
    args = parser.parse_args()
    head = torch.load(args.head, weights_only=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "config.json").write_text(json.dumps(config_of(head, int4=args.int4), indent=1) + "\n")
    save_file(tensors_of(head, int4=args.int4), args.out / "model.safetensors")
    print(f"{args.out}: {(args.out / 'model.safetensors').stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
