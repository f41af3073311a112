"""Loads a block head (DFlash), or the shard of one rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from swiftspec.errors import UserError
from swiftspec.model.block_head import BlockHead, BlockHeadWeights
from swiftspec.model.checkpoint import Checkpoint
from swiftspec.model.checkpoint_files import Progress, open_tensors, read_config
from swiftspec.model.config import ModelConfig
from swiftspec.model.formats import format_of
from swiftspec.model.formats.int8 import LoadTimeQuantization
from swiftspec.model.head_loader import head_config
from swiftspec.model.loader import NO_QUANTIZATION, shard_of
from swiftspec.model.shard import Shard
from swiftspec.model.tensor_parallel import TensorParallelGroup
from swiftspec.model.transformer import ModelOps
from swiftspec.model.weights import LayerWeights, ModelWeights, Weight, fuse_weights


def load_block_head(
    path: str | Path,
    target: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    ops: ModelOps,
    max_positions: int,
    group: TensorParallelGroup | None = None,
    quantization: LoadTimeQuantization = NO_QUANTIZATION,
    cache_dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> BlockHead:
    """Loads a block head. Parameters as in `load_model`.

    `path`: directory of a DFlash checkpoint.
    `target`: checkpoint of the target, whose embedding and LM head are used.
    Raises UserError as `load_model`, and if the head does not fit the target.
    """
    config = head_config(path, target)
    shard = None if group is None else shard_of(config, group, path)
    tensors = open_tensors(path, progress, dtype)
    read = Checkpoint(config.spec, tensors, format_of(config), config.names)
    head, hidden = config.spec.draft_head, config.spec.hidden_size
    assert head is not None
    layers = [partial(read.layer, index) for index in range(len(config.spec.layers))]
    shared = _embedding_and_head(config, path, target, dtype)
    whole = replace(shared, layers=layers, norm=read.norm(config.names.norm, hidden))
    decoder = whole if shard is None else shard.cut(whole)
    context, key_norms = _context(config, decoder, shard)
    weights = BlockHeadWeights(
        decoder=quantization.of_weights(decoder),
        target_projection=read.linear("fc", hidden, len(head.target_layer_ids) * head.target_hidden_size, bias=False),
        target_norm=read.norm("hidden_norm", hidden),
        context=context,
        key_norms=key_norms,
    )
    model = BlockHead(
        config.spec, weights, ops, device, dtype, max_positions, shard=shard, group=group, cache_dtype=cache_dtype
    )
    tensors.check_all_taken()
    return model


def _embedding_and_head(
    config: ModelConfig, path: str | Path, target: str | Path, dtype: torch.dtype
) -> ModelWeights:  # fmt: skip
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
