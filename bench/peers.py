"""The same pair in transformers, for comparison: plain generation and assisted generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from swiftspec.config import ModelConfig
from swiftspec.model.linear import Int4Weight


def load_transformers(path: Path, dtype: torch.dtype) -> Any:
    """A transformers model with a checkpoint's weights, int4 ones dequantised.

    transformers itself reads AWQ only through another library, and would compute the same products.
    """
    import transformers

    data = json.loads((path / "config.json").read_text())
    data.pop("quantization_config", None)
    config = transformers.AutoConfig.for_model(**data)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    result = model.load_state_dict(dense_state(path, dtype), strict=False, assign=True)
    model.tie_weights()
    missing = set(result.missing_keys) - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    assert not missing and not result.unexpected_keys, f"not loaded: {missing or result.unexpected_keys}"
    return model.eval()


def dense_state(path: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every weight of a checkpoint by its Hugging Face name, dense, in `dtype`; AutoAWQ "gemm" matrices unpacked."""
    quant = ModelConfig.from_dir(path).quant
    raw: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        raw |= load_file(file)
    state: dict[str, torch.Tensor] = {}
    for name, tensor in raw.items():
        module, _, kind = name.rpartition(".")
        if kind == "qweight":
            assert quant is not None and quant.layout == "awq-gemm"
            int4 = Int4Weight.from_awq(tensor, raw[f"{module}.qzeros"], raw[f"{module}.scales"], quant.group_size)
            state[f"{module}.weight"] = int4.dequantize(dtype)
        elif kind not in ("qzeros", "scales"):
            state[name] = tensor.to(dtype)
    return state
