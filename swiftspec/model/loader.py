"""Loads a checkpoint as a model, or as the shard of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from swiftspec.capabilities import NotSupported, check_features
from swiftspec.errors import UserError
from swiftspec.model.checkpoint import Checkpoint
from swiftspec.model.checkpoint_files import Progress, open_tensors, read_config
from swiftspec.model.config import ModelConfig
from swiftspec.model.float8 import FLOAT8, Fp8KVScale
from swiftspec.model.formats import format_of
from swiftspec.model.formats.int8 import LoadTimeQuantization
from swiftspec.model.packed_model import PackedModel
from swiftspec.model.shard import EIGHT, Shard
from swiftspec.model.spec import ModelSpec, traits
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
    context: int | None = None,
    group: TensorParallelGroup | None = None,
    quantization: LoadTimeQuantization = NO_QUANTIZATION,
    cache_dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    packed_cache: PackedWeightSource | None = None,
    hidden_layers: tuple[int, ...] = (),
    vocab_rows: int = 0,
) -> Transformer:
    """Loads a directory or GGUF file as a model that computes in `dtype`; None: the dtype of the checkpoint.

    `max_positions`: length of the RoPE tables. `context`: most tokens of a text, which decides the factors of longrope;
    None: `max_positions`, which may also have room for the nodes of trees. `group`: loads only this rank's shard; every
    rank of the group must run the same forwards. `quantization`: what is quantised at load. `cache_dtype`: dtype of the
    KV cache; None: that of the model; for float8 the weights are scaled so that keys and values fit (float8.py).
    `packed_cache`: cache for weights that `ops` packs. `hidden_layers`: the layers after which every forward keeps the
    hidden states. `vocab_rows`: embedding and LM head with fewer rows are padded to that many, with zeros.

    Raises UserError if the checkpoint is damaged, is not supported, or cannot be divided over the ranks of `group`.
    """
    stored = read_config(path)
    config = _with_vocab_rows(stored, vocab_rows)
    spec = config.spec.for_context(max_positions if context is None else context)
    shard = None if group is None else shard_of(config, group, path)
    kind: torch.dtype = dtype or getattr(torch, config.dtype)
    tensors = open_tensors(path, progress, kind)
    names = config.names.found_in(tensors)
    weights = Checkpoint(stored.spec, tensors, format_of(config), names).read().with_vocab_rows(spec.vocab_size)
    weights = quantization.of_weights(weights if shard is None else shard.cut(weights))
    if cache_dtype == FLOAT8:
        weights = _scale_for_float8(path, spec, weights, shard)
    entry = None
    if packed_cache is not None:
        share = [0, 1] if shard is None else [shard.rank, shard.size]
        facts = {"files": tensors.facts, "config": repr(config), "dtype": str(kind), "share": share}
        facts |= {} if cache_dtype is None else {"cache": str(cache_dtype)}
        entry = packed_cache.entry({**facts, "quantization": repr(quantization)})

        def skip(layer: int | None) -> None:
            tensors.skip(f"{names.head if layer is None else names.layer(layer)}.")

        weights = entry.load(weights, kind, skip)
    model = Transformer(
        spec,
        weights,
        ops,
        device,
        kind,
        max_positions,
        shard=shard,
        group=group,
        cache_dtype=cache_dtype,
        hidden_layers=hidden_layers,
        stream_dtype=torch.float32 if kind == torch.bfloat16 and ops.FLOAT32_STREAM else kind,
    )
    if names.mtp_layer:
        tensors.skip(f"{names.layer(len(spec.layers))}.")
    tensors.check_all_taken(names.text_prefixes)
    if entry is not None:
        entry.store(model.stack)
    return model


def shard_of(config: ModelConfig, group: TensorParallelGroup, path: str | Path) -> Shard:
    """Returns this rank's shard. Raises UserError, which names the model, if it cannot be divided."""
    try:
        return Shard.of(config, group.rank, group.size)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _with_vocab_rows(config: ModelConfig, rows: int) -> ModelConfig:
    """Returns the config with at least `rows` rows in embedding and LM head, rounded up to whole groups of eight."""
    if rows <= config.spec.vocab_size:
        return config
    return replace(config, spec=replace(config.spec, vocab_size=-(-rows // EIGHT) * EIGHT))


def _scale_for_float8(path: str | Path, spec: ModelSpec, weights: ModelWeights, shard: Shard | None) -> ModelWeights:
    """Returns weights whose keys and values fit float8. Raises UserError if keys and values have no bound."""
    try:
        check_features({"float8 cache", *traits(spec)})
    except NotSupported as error:
        raise UserError(f"{path}: {error}") from None
    mixers = [layer.attention for layer in spec.layers]
    counts = [(mixer.num_heads, mixer.num_kv_heads) for mixer in mixers]
    if shard is not None:
        counts = [(part.num_heads, part.kv_heads) for part in shard.layers]
    layers = [
        partial(Fp8KVScale(*heads, mixer.head_dim, max(1.0, mixer.rope.attention_factor)).of_layer, read)
        for heads, mixer, read in zip(counts, mixers, weights.layers, strict=True)
    ]
    return replace(weights, layers=layers)
