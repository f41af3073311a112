"""Estimates the GPU memory that a pair of models needs, from shapes alone, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from swiftspec.backends.cuda import PREFILL_CHUNK_ROWS
from swiftspec.backends.cuda.large_m import MAX_KERNEL_ROWS, SCRATCH_BYTES
from swiftspec.errors import UserError
from swiftspec.model.config import ModelConfig
from swiftspec.model.formats import format_of
from swiftspec.model.spec import ModelSpec

INT4_BITS_PER_WEIGHT = 4.25  # with scales and zero points in groups of 128
BYTES_PER_GB = 1e9


def kv_bytes_per_token(spec: ModelSpec, cache_dtype: torch.dtype) -> int:
    """Returns the size of one token's keys and values in all layers, in bytes."""
    return sum(2 * layer.mixer.kv_size for layer in spec.layers) * cache_dtype.itemsize


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Estimate of the GPU memory, in bytes, that a model needs on each of the `ranks` ranks that share it: weights, KV
    cache of `slots` slots, and the buffers of a prefill chunk."""

    config: ModelConfig
    dtype: torch.dtype
    slots: int
    ranks: int
    cache_dtype: torch.dtype | None = None  # None: `dtype`

    @property
    def weights(self) -> float:
        spec = self.config.spec
        outputs = sum(
            2 * layer.mixer.q_size + 2 * layer.mixer.kv_size + 3 * layer.mlp.intermediate_size for layer in spec.layers
        )  # of a layer's projections, except O and down: their inputs
        layout = format_of(self.config)
        bits = INT4_BITS_PER_WEIGHT if layout is not None and layout.is_int4 else 8 * self.dtype.itemsize
        matrices = spec.hidden_size * outputs
        tables = 2 * spec.vocab_size * spec.hidden_size  # the head is packed separately, even if it is tied
        return (matrices * bits / 8 + tables * self.dtype.itemsize) / self.ranks

    @property
    def cache(self) -> float:
        return kv_bytes_per_token(self.config.spec, self.cache_dtype or self.dtype) * self.slots / self.ranks

    @property
    def chunk(self) -> float:
        """Size of the buffers of a prefill chunk: weights unpacked to bfloat16 (backends/cuda/large_m.py), hidden
        states, gates and products of all rows, and the packed input rows of a kernel for large M
        (csrc/cuda/linear/large_m.h)."""
        spec = self.config.spec
        hidden, inner = spec.hidden_size, max(layer.mlp.intermediate_size for layer in spec.layers) // self.ranks
        numbers = PREFILL_CHUNK_ROWS * 4 * (hidden + inner) + MAX_KERNEL_ROWS * max(hidden, inner)
        return SCRATCH_BYTES + numbers * self.dtype.itemsize


def check_memory(needs: Iterable[MemoryEstimate], device: torch.device) -> None:
    """Raises UserError if the models of a rank do not fit into the free memory of its GPU. `needs`: the estimate of
    each of these models."""
    held = list(needs)
    weights, cache = sum(need.weights for need in held), sum(need.cache for need in held)
    chunk = sum(need.chunk for need in held)
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # reserved by torch and unused
    if weights + cache + chunk <= free:
        return
    raise UserError(
        f"the models need {(weights + cache + chunk) / BYTES_PER_GB:.1f} GB of GPU memory"
        f" ({weights / BYTES_PER_GB:.1f} for weights,"
        f" {cache / BYTES_PER_GB:.1f} for the KV cache of {held[0].slots} tokens,"
        f" {chunk / BYTES_PER_GB:.1f} for prefill), but"
        f" {torch.cuda.get_device_name(device)} has {free / BYTES_PER_GB:.1f} GB free:"
        " use a smaller max_model_len, int4 weights,"
        f" {'' if held[0].cache_dtype else 'kv_cache_dtype fp8, '}or more GPUs (--target-tp N)"
    )
