"""How much of a GPU's memory a pair needs, worked out from shapes alone, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from swiftspec.errors import UserError
from swiftspec.model.config import ModelConfig

INT4_BITS = 4.25  # a weight's, with scales and zero points in groups of 128
GB = 1e9


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one rank of `ranks` that share a model: its weights, and its keys and values for so many slots."""

    config: ModelConfig
    dtype: torch.dtype
    slots: int
    ranks: int

    @property
    def weights(self) -> float:
        config = self.config
        heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim  # of queries, keys, values, O
        matrices = config.num_layers * config.hidden_size * (heads + 3 * config.intermediate_size)
        bits = INT4_BITS if config.quantization else 8 * self.dtype.itemsize
        tables = 2 * config.vocab_size * config.hidden_size  # a head is packed for itself, also one that is tied
        return (matrices * bits / 8 + tables * self.dtype.itemsize) / self.ranks

    @property
    def cache(self) -> float:
        config = self.config
        each = 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.dtype.itemsize
        return each * self.slots / self.ranks


def check_memory(needs: Iterable[Need], device: torch.device) -> None:
    """Raises UserError where the models that a rank holds cannot fit the memory that is free on its GPU."""
    held = list(needs)
    weights, cache = sum(need.weights for need in held), sum(need.cache for need in held)
    free, _ = torch.cuda.mem_get_info(device)
    if weights + cache <= free:
        return
    raise UserError(
        f"the models need {(weights + cache) / GB:.1f} GB of GPU memory, {weights / GB:.1f} for weights and"
        f" {cache / GB:.1f} for {held[0].slots} tokens of context, and {torch.cuda.get_device_name(device)} has"
        f" {free / GB:.1f} free: take a smaller max_model_len, int4 weights, or more GPUs"
    )
