"""Small random checkpoints, written by transformers, whose greedy text varies enough to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from swiftspec.model.architectures import ARCHITECTURES
from swiftspec.model.batch import Batch

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
FAMILIES = [architecture.model_type for architecture in ARCHITECTURES.values()]


def make_model(
    *,
    family: str = "llama",
    rope: dict[str, Any] | None = None,
    tie: bool = False,
    vocab: int = 64,
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **config: Any,
) -> PreTrainedModel:
    """A random transformers model; `config` overrides any field, such as num_key_value_heads or attention_bias."""
    fields: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 512,
        "rope_parameters": dict(rope or ROPES["default"]),
        "tie_word_embeddings": tie,
        "dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    fields |= config
    fields.setdefault("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields)).to(dtype).eval()
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # strong layers: with weak ones the residual stream repeats its token, especially with tied embeddings
            scale = 1.0 if "embed" in name else 2.5 / weight.shape[-1] ** 0.5 if weight.ndim == 2 else 0.3
            drawn = scale * torch.randn(weight.shape, generator=noise, dtype=torch.float64)
            weight.copy_(1 + drawn if "norm" in name else drawn)
    return model


def make_checkpoint(path: Path, *, shards: int = 1, **model: Any) -> PreTrainedModel:
    """Writes `make_model(**model)` to a directory, in about `shards` files, and returns it."""
    built = make_model(**model)
    size = sum(weight.numel() * weight.element_size() for weight in built.parameters())
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        built.save_pretrained(path, max_shard_size=size // shards if shards > 1 else 2 * size)
    finally:
        if bars:
            logging.enable_progress_bar()
    return built


def chain(tokens: list[int], start: int = 0, sequence: int = 0, sequences: int = 1) -> Batch:
    """Consecutive tokens of one sequence: a prompt, or a chunk of it after `start` others."""
    count = len(tokens)
    places = torch.arange(start, start + count)
    lengths = torch.zeros(sequences, dtype=torch.int64)
    lengths[sequence] = start + count
    return Batch(
        tokens=torch.tensor(tokens),
        positions=places,
        slots=places,
        mask=torch.ones(count, count, dtype=torch.bool).tril(),
        sequence=torch.full((count,), sequence),
        kv_len=lengths,
    )


def make_pair(folder: Path, *, vocab: int = 64, seed: int = 1, **shape: Any) -> tuple[Path, Path]:
    """Checkpoints of a target and of a draft that often agrees with it: the same model with noise on its weights."""
    model = make_checkpoint(folder / "target", vocab=vocab, layers=2, dtype=torch.float64, seed=seed, **shape)
    noise = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=noise, dtype=weight.dtype)
    model.save_pretrained(folder / "draft")
    return folder / "target", folder / "draft"
