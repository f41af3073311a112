"""Loads a checkpoint into transformers as a baseline, and writes dense copies of checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.baselines.checkpoint import Weights


def load_transformers(path: Path, dtype: torch.dtype) -> Any:
    """Loads a checkpoint as a transformers model, with int4 weights dequantised.

    transformers would read AWQ only with an additional library; dequantised weights give the same products.
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
    """Returns all weights of a checkpoint in `dtype`, by Hugging Face name. Int4 matrices are dequantised."""
    weights = Weights(path)
    return {name: weights.dense(name, dtype) for name in weights.names}


def write_dense(path: Path, folder: Path, dtype: torch.dtype) -> None:
    """Writes a copy of the checkpoint `path` with dense weights in `dtype` to `folder`."""
    for file in path.glob("*.json"):
        shutil.copy(file, folder)
    data = json.loads((path / "config.json").read_text())
    data.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(data))
    save_file(dense_state(path, dtype), folder / "model.safetensors")
