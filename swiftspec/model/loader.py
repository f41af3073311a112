"""Loads a checkpoint directory as a model, or as one rank's share of it."""

from __future__ import annotations

from pathlib import Path

import torch

from swiftspec.errors import UserError
from swiftspec.model.checkpoint import Checkpoint
from swiftspec.model.files import Progress, open_tensors, read_config
from swiftspec.model.formats import format_of
from swiftspec.model.formats.int8 import Rounding
from swiftspec.model.group import Group
from swiftspec.model.shard import Shard
from swiftspec.model.transformer import Ops, Transformer

NO_ROUNDING = Rounding()


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    ops: Ops,
    max_positions: int,
    group: Group | None = None,
    rounding: Rounding = NO_ROUNDING,
    progress: Progress | None = None,
) -> Transformer:
    """A checkpoint directory as a model that computes in `dtype`; None takes the one that config.json names.

    `rounding`: what is rounded to int8, for the operators of a CPU. With a group it is this rank's share, and every
    rank of the group must run the same forwards. Raises UserError on a checkpoint that is damaged, of another kind, or
    cannot be cut for so many ranks.
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
    kind: torch.dtype = dtype or getattr(torch, config.dtype)
    model = Transformer(config, weights, ops, device, kind, max_positions, share=shard, group=group)
    tensors.check_all_taken()
    return model
