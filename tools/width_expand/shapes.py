"""Target shapes of width expansion, and the config.json of a width-expanded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch

from swiftspec.errors import UserError
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.config_json import parse_config
from tools.width_expand.maps import GROUP

FIELDS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "tie_word_embeddings",
)  # fmt: skip
SHAPES: dict[str, tuple[int | bool, ...]] = {
    "Llama-3.2-1B": (2048, 16, 32, 8, 64, 8192, 128256, True),
    "Llama-3.2-3B": (3072, 28, 24, 8, 128, 8192, 128256, True),
    "Llama-3-8B": (4096, 32, 32, 8, 128, 14336, 128256, False),
    "Llama-3-70B": (8192, 80, 64, 8, 128, 28672, 128256, False),
}
Kind = Literal["int4", "bf16", "f32"]
DTYPES = {"int4": torch.bfloat16, "bf16": torch.bfloat16, "f32": torch.float32}


def read_shape(shape: str) -> dict[str, Any]:
    """Returns the sizes in FIELDS for the name of a shape or a config.json. Raises UserError if it is neither."""
    if shape in SHAPES:
        return dict(zip(FIELDS, SHAPES[shape], strict=True))
    if not Path(shape).is_file():
        raise UserError(f"{shape}: expected {', '.join(SHAPES)}, or the path of a config.json")
    data = json.loads(Path(shape).read_text(encoding="utf-8"))
    spec = parse_config(data).spec
    mixer, mlp = spec.layer.attention, spec.layer.mlp
    sizes = (spec.hidden_size, len(spec.layers), mixer.num_heads, mixer.num_kv_heads, mixer.head_dim)
    rest = (mlp.intermediate_size, spec.vocab_size, spec.tie_word_embeddings)
    return dict(zip(FIELDS, sizes + rest, strict=True))


def grown_config(path: str | Path, sizes: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """Returns the config.json of the small model at `path` in the large shape `sizes`, with weights of type `kind`. Its
    other fields, such as family, biases and RoPE, are those of the small model."""
    small, own = read_config(path), json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    share = small.spec.hidden_size / sizes["hidden_size"]
    quant = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP, "zero_point": True}
    changed = sizes | {
        "rms_norm_eps": small.spec.norm_eps * share / (2 if sizes["vocab_size"] > small.spec.vocab_size else 1),
        "eos_token_id": list(small.eos_token_ids),
        "torch_dtype": str(DTYPES[kind]).removeprefix("torch."),
        **({"quantization_config": quant} if kind == "int4" else {}),
    }
    replaced = ("dtype", "quantization_config", "layer_types")  # `layer_types` has an entry per layer
    return {name: value for name, value in own.items() if name not in replaced} | changed
