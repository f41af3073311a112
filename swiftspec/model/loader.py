"""Loads a checkpoint directory as a model, or as one rank's share of it."""

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
from swiftspec.model.formats.int8 import Rounding
from swiftspec.model.packed_model import PackedModel
from swiftspec.model.shard import Shard
from swiftspec.model.tensor_parallel import TensorParallelGroup
from swiftspec.model.transformer import ModelOps, Transformer
from swiftspec.model.weights import ModelWeights


class Entry(Protocol):
    """One model among those whose packed weights are kept."""

    def load(self, weights: ModelWeights, dtype: torch.dtype, skip: Callable[[str], object], /) -> ModelWeights:
        """The weights, with what is kept in place of what would be read. `skip` hears the prefix of the tensors that
        nobody will take then."""
        ...

    def store(self, stack: PackedModel, /) -> None:
        """Keeps what had to be packed, at some time."""
        ...


class Kept(Protocol):
    """Packed weights of earlier starts; backends/cpu/packed_weight_cache.py has some."""

    def entry(self, facts: Mapping[str, object], /) -> Entry:
        """Of the model whose packed weights follow from these facts."""
        ...


NO_ROUNDING = Rounding()


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    ops: ModelOps,
    max_positions: int,
    group: TensorParallelGroup | None = None,
    rounding: Rounding = NO_ROUNDING,
    cache_dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    kept: Kept | None = None,
) -> Transformer:
    """A checkpoint directory as a model that computes in `dtype`; None takes the one that config.json names.

    `rounding`: what is rounded to int8, for the operators of a CPU. `cache_dtype`: of the keys and values that will be
    stored, None for the model's; with float8 its weights are moved so that they fit (float8.py). `kept`: where what
    `ops` packs may be kept for the next time. With a group it is this rank's share, and every rank of the group must
    run the same forwards. Raises UserError on a checkpoint that is damaged, of another kind, or cannot be cut for so
    many ranks.
    """
    config = read_config(path)
    shard = None
    if group is not None:
        try:
            shard = Shard.of(config, group.rank, group.size)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    tensors = open_tensors(path, progress)
    weights = Checkpoint(config, tensors, format_of(config)).read()
    weights = rounding.of_weights(weights if shard is None else shard.cut(weights))
    if cache_dtype == FLOAT8:
        own = config if shard is None else shard
        kv_heads = config.num_kv_heads if shard is None else shard.kv_heads
        weights = Fp8KVScale(own.num_heads, kv_heads, config.head_dim).of_weights(weights)
    kind: torch.dtype = dtype or getattr(torch, config.dtype)
    entry = None
    if kept is not None:
        share = [0, 1] if shard is None else [shard.rank, shard.size]
        facts = {"files": tensors.facts, "config": repr(config), "dtype": str(kind), "share": share}
        facts |= {} if cache_dtype is None else {"cache": str(cache_dtype)}
        entry = kept.entry({**facts, "rounding": repr(rounding)})
        weights = entry.load(weights, kind, tensors.skip)
    model = Transformer(
        config, weights, ops, device, kind, max_positions, share=shard, group=group, cache_dtype=cache_dtype
    )
    tensors.check_all_taken()
    if entry is not None:
        entry.store(model.stack)
    return model
