"""Loads a checkpoint as a model, or as the shard of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from swiftspec.errors import UserError
from swiftspec.model.checkpoint import Checkpoint
from swiftspec.model.checkpoint_files import Progress, open_tensors, read_config
from swiftspec.model.float8 import FLOAT8, Fp8KVScale
from swiftspec.model.formats import format_of
from swiftspec.model.formats.int8 import LoadTimeQuantization
from swiftspec.model.packed_model import PackedModel
from swiftspec.model.shard import Shard
from swiftspec.model.tensor_parallel import TensorParallelGroup
from swiftspec.model.transformer import ModelOps, Transformer
from swiftspec.model.weights import ModelWeights


class Entry(Protocol):
    """Cache entry of one model's packed weights."""

    def load(self, weights: ModelWeights, dtype: torch.dtype, skip: Callable[[int | None], object], /) -> ModelWeights:
        """Returns `weights` with cached packed weights instead of those that would be read from the checkpoint.

        `dtype`: that of the model. `skip`: called when cached weights replace those of the checkpoint, with the index
        of the layer, or with None for the LM head.
        """
        ...

    def store(self, stack: PackedModel, /) -> None:
        """Stores the packed weights of `stack` that the entry lacks; may return before they are written."""
        ...


class PackedWeightSource(Protocol):
    """Cache of packed weights from earlier starts; see backends/cpu/packed_weight_cache.py."""

    def entry(self, facts: Mapping[str, object], /) -> Entry:
        """Returns the entry for `facts`: everything that determines the packed weights, such as files and dtype."""
        ...


NO_QUANTIZATION = LoadTimeQuantization()


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    ops: ModelOps,
    max_positions: int,
    group: TensorParallelGroup | None = None,
    quantization: LoadTimeQuantization = NO_QUANTIZATION,
    cache_dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    packed_cache: PackedWeightSource | None = None,
    hidden_layers: tuple[int, ...] = (),
) -> Transformer:
    """Loads a directory or GGUF file as a model that computes in `dtype`; None: the dtype of the checkpoint.

    `max_positions`: length of the RoPE tables. `group`: loads only this rank's shard; every rank of the group must run
    the same forwards. `quantization`: what is quantised at load. `cache_dtype`: dtype of the KV cache; None: that of
    the model; for float8 the weights are scaled so that keys and values fit (float8.py). `packed_cache`: cache for
    weights that `ops` packs. `hidden_layers`: the layers after which every forward keeps the hidden states.

    Raises UserError if the checkpoint is damaged, is not supported, or cannot be divided over the ranks of `group`.
    """
    config = read_config(path)
    spec, names = config.spec, config.names
    shard = None
    if group is not None:
        try:
            shard = Shard.of(config, group.rank, group.size)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    kind: torch.dtype = dtype or getattr(torch, config.dtype)
    tensors = open_tensors(path, progress, kind)
    weights = Checkpoint(spec, tensors, format_of(config), names).read()
    weights = quantization.of_weights(weights if shard is None else shard.cut(weights))
    if cache_dtype == FLOAT8:
        mixer = spec.layer.mixer
        heads = (mixer.num_heads, mixer.num_kv_heads) if shard is None else (shard.num_heads, shard.kv_heads)
        weights = Fp8KVScale(*heads, mixer.head_dim).of_weights(weights)
    entry = None
    if packed_cache is not None:
        share = [0, 1] if shard is None else [shard.rank, shard.size]
        facts = {"files": tensors.facts, "config": repr(config), "dtype": str(kind), "share": share}
        if spec.tie_word_embeddings and f"{names.head}.weight" in tensors:
            facts["head"] = "checkpoint"  # an entry without this fact may contain the embedding as the head
        facts |= {} if cache_dtype is None else {"cache": str(cache_dtype)}
        entry = packed_cache.entry({**facts, "quantization": repr(quantization)})

        def skip(layer: int | None) -> None:
            tensors.skip(f"{names.head if layer is None else names.layer(layer)}.")

        weights = entry.load(weights, kind, skip)
    model = Transformer(
        spec, weights, ops, device, kind, max_positions, shard=shard, group=group, cache_dtype=cache_dtype,
        hidden_layers=hidden_layers,
    )  # fmt: skip
    tensors.check_all_taken()
    if entry is not None:
        entry.store(model.stack)
    return model
