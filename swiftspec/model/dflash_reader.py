"""Reads the checkpoint of a block head (DFlash)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from swiftspec.errors import UserError
from swiftspec.model.block_head import BlockHeadWeights
from swiftspec.model.checkpoint import Checkpoint
from swiftspec.model.checkpoint_files import Progress, open_tensors, read_config
from swiftspec.model.config import ModelConfig
from swiftspec.model.formats import format_of
from swiftspec.model.shard import Shard
from swiftspec.model.weights import LayerWeights, ModelWeights, Weight, fuse_weights


class DFlashReader:
    """Reader of a DFlash checkpoint. Embedding and LM head are the target's."""

    def __init__(
        self, config: ModelConfig, path: str | Path, target: str | Path, dtype: torch.dtype, progress: Progress | None
    ) -> None:
        self._config, self._path, self._target, self._dtype = config, path, target, dtype
        self._tensors = open_tensors(path, progress, dtype)
        self._checkpoint = Checkpoint(config.spec, self._tensors, format_of(config), config.names)

    def read(self, shard: Shard | None) -> BlockHeadWeights:
        """Returns the weights, or those of one rank's shard."""
        config, read = self._config, self._checkpoint
        head, hidden = config.spec.draft_head, config.spec.hidden_size
        assert head is not None
        layers = [partial(read.layer, index) for index in range(len(config.spec.layers))]
        shared = _embedding_and_head(config, self._path, self._target, self._dtype)
        whole = replace(shared, layers=layers, norm=read.norm(config.names.norm, hidden))
        decoder = whole if shard is None else shard.cut(whole)
        context, key_norms = _context(config, decoder, shard)
        states = len(head.target_layer_ids) * head.target_hidden_size
        return BlockHeadWeights(
            decoder=decoder,
            target_projection=read.linear("fc", hidden, states, bias=False),
            target_norm=read.norm("hidden_norm", hidden),
            context=context,
            key_norms=key_norms,
        )

    def check_all_taken(self) -> None:
        """Raises UserError if the checkpoint has other weights than these."""
        self._tensors.check_all_taken()


def _embedding_and_head(config: ModelConfig, path: str | Path, target: str | Path, dtype: torch.dtype) -> ModelWeights:
    """Returns the weights of the target, of which a block head has embedding and LM head. Raises UserError if their
    shape is not that of the head."""
    theirs, spec = read_config(target), config.spec
    shapes = [[each.vocab_size, each.hidden_size] for each in (theirs.spec, spec)]
    if shapes[0] != shapes[1]:
        raise UserError(
            f"{path}: the embedding of target {target} has the shape {shapes[0]} instead of {shapes[1]}; use a head of"
            " this target"
        )
    tensors = open_tensors(target, None, dtype)
    return Checkpoint(theirs.spec, tensors, format_of(theirs), theirs.names.found_in(tensors)).read()


def _context(config: ModelConfig, decoder: ModelWeights, shard: Shard | None) -> tuple[Weight, list[Tensor]]:
    """Returns the projection of a verified position to the keys and values of all layers, and the norms of the keys."""
    parts, norms = list[Weight](), list[Tensor]()
    for index, read in enumerate(decoder.layers):
        layer: LayerWeights = read()
        mixer = config.spec.layers[index].attention
        queries = mixer.q_size if shard is None else shard.layers[index].num_heads * mixer.head_dim
        parts.append(layer.qkv.outputs(torch.arange(queries, layer.qkv.shape[0])))
        assert layer.k_norm is not None
        norms.append(layer.k_norm.view(-1))
    return fuse_weights(parts), norms
