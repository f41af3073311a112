"""Loads a draft head, or the shard of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from swiftspec.errors import UserError
from swiftspec.model.architectures.draft_heads import mtp_config
from swiftspec.model.block_head import BlockHead, BlockHeadWeights
from swiftspec.model.checkpoint import Checkpoint, Source
from swiftspec.model.checkpoint_files import Progress, open_tensors, read_config
from swiftspec.model.config import ModelConfig
from swiftspec.model.dflash_reader import DFlashReader
from swiftspec.model.draft_head import DraftHead, DraftHeadWeights
from swiftspec.model.formats import format_of
from swiftspec.model.formats.int8 import LoadTimeQuantization
from swiftspec.model.gguf.file import is_gguf
from swiftspec.model.loader import NO_QUANTIZATION, shard_of
from swiftspec.model.shard import EIGHT, Shard
from swiftspec.model.spec import DraftHeadSpec
from swiftspec.model.tensor_names import TensorNames
from swiftspec.model.tensor_parallel import TensorParallelGroup
from swiftspec.model.transformer import ModelOps
from swiftspec.model.weights import LayerWeights, ModelWeights, Weight


def head_config(path: str | Path | None, target: str | Path) -> ModelConfig:
    """Returns the configuration of the draft head in a directory, or for None that of the MTP layer in the checkpoint
    of the target. Raises UserError if it does not fit the target."""
    of_target = read_config(target)
    if path is None:
        return mtp_config(of_target)
    config = read_config(path)
    head = config.spec.draft_head
    assert head is not None
    if head.target_hidden_size != of_target.spec.hidden_size:
        sizes = f"{head.target_hidden_size}, that of target {target} is {of_target.spec.hidden_size}"
        raise UserError(f"{path}: the draft head reads hidden states of size {sizes}; use a head of this target")
    try:
        head.hidden_layers(len(of_target.spec.layers))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return config


def load_draft_head(
    path: str | Path | None,
    target: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    ops: ModelOps,
    max_positions: int,
    context: int | None = None,
    group: TensorParallelGroup | None = None,
    quantization: LoadTimeQuantization = NO_QUANTIZATION,
    progress: Progress | None = None,
) -> DraftHead | BlockHead:
    """Loads a draft head. Parameters as in `load_model`. Its KV cache has the dtype of the head.

    `path`: directory of an EAGLE-3 or DFlash checkpoint; None: the MTP layer in the checkpoint of the target.
    `target`: checkpoint of the target, whose embedding and LM head are used if the head has none.
    Raises UserError as `load_model`, and if the head does not fit the target.
    """
    config = head_config(path, target)
    shard = None if group is None else shard_of(config, group, target if path is None else path)
    reader = _reader(config, path, target, dtype, progress)
    weights = reader.read(shard)
    decoder, rest = quantization.of_weights(weights.decoder), (ops, device, dtype, max_positions)
    spec = config.spec.for_context(max_positions if context is None else context)
    if isinstance(weights, BlockHeadWeights):
        model = BlockHead(spec, replace(weights, decoder=decoder), *rest, shard=shard, group=group)
    else:
        model = DraftHead(spec, replace(weights, decoder=decoder), *rest, shard=shard, group=group)
    reader.check_all_taken()
    return model


class HeadReader(Protocol):
    """Reader of a draft head's weights."""

    def read(self, shard: Shard | None, /) -> DraftHeadWeights | BlockHeadWeights:
        """Returns the weights, or those of one rank's shard."""
        ...

    def check_all_taken(self) -> None:
        """Raises UserError if the head has other weights than these."""


def _reader(
    config: ModelConfig, path: str | Path | None, target: str | Path, dtype: torch.dtype, progress: Progress | None
) -> HeadReader:
    if path is None:
        return _Mtp(config, target, dtype, progress)
    head = config.spec.draft_head
    kind = DFlashReader if head is not None and head.kind == "dflash" else _Eagle3
    return kind(config, path, target, dtype, progress)


@dataclass(frozen=True, slots=True)
class _MtpModules:
    """Names of the modules of an MTP layer besides those of its decoder layer."""

    decoder: TensorNames
    projection: str
    embedding_norm: str
    hidden_norm: str

    @staticmethod
    def of(path: str | Path, names: TensorNames) -> _MtpModules:
        """Returns the names in the checkpoint of a target. `names`: of the target's modules."""
        if not is_gguf(Path(path)):
            decoder = replace(names, layers="mtp.layers", norm="mtp.norm")
            return _MtpModules(decoder, "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
        layer = names.layer(len(read_config(path).spec.layers))  # the one after the last layer of the target
        inner = f"{layer}.nextn"
        decoder = replace(names, only_layer=layer, norm=f"{inner}.shared_head_norm")
        return _MtpModules(decoder, f"{inner}.eh_proj", f"{inner}.enorm", f"{inner}.hnorm")


class _Mtp:
    """Reader of the MTP layer in the checkpoint of a target."""

    def __init__(self, config: ModelConfig, path: str | Path, dtype: torch.dtype, progress: Progress | None) -> None:
        self._tensors = open_tensors(path, progress, dtype)
        names = config.names.found_in(self._tensors)
        self._modules, self._target_norm = _MtpModules.of(path, names), names.norm
        if f"{self._modules.embedding_norm}.weight" not in self._tensors:
            raise UserError(f"{path}: the checkpoint has no MTP layer ({self._modules.projection}); use another draft")
        self._hidden_size = config.spec.hidden_size
        self._checkpoint = Checkpoint(config.spec, self._tensors, format_of(config), self._modules.decoder)

    def read(self, shard: Shard | None) -> DraftHeadWeights:
        hidden, read, modules = self._hidden_size, self._checkpoint, self._modules
        embedding, state = _halves(read.linear(modules.projection, hidden, 2 * hidden, bias=False))
        decoder = read.read()
        return DraftHeadWeights(
            decoder=decoder if shard is None else shard.cut(decoder),
            embedding_norm=read.norm(modules.embedding_norm, hidden),
            embedding_projection=embedding,
            hidden_norm=read.norm(modules.hidden_norm, hidden),
            hidden_projection=state,
            target_projection=None,
            target_norm=read.norm(self._target_norm, hidden),
            token_ids=None,
        )

    def check_all_taken(self) -> None:
        """Raises UserError if the MTP layer has other weights than this one."""
        self._tensors.check_all_taken(("mtp.",))


class _Eagle3:
    """Reader of an EAGLE-3 checkpoint."""

    def __init__(
        self, config: ModelConfig, path: str | Path, target: str | Path, dtype: torch.dtype, progress: Progress | None
    ) -> None:
        self._tensors, self._target, self._dtype = open_tensors(path, progress, dtype), target, dtype
        names = config.names
        if f"{names.only_layer}.{names.input_norm}.weight" not in self._tensors:  # as the library speculators writes it
            names = replace(names, only_layer="")
        self._names, self._spec, self._path = names, config.spec, path
        self._checkpoint = Checkpoint(config.spec, self._tensors, format_of(config), names)

    def read(self, shard: Shard | None) -> DraftHeadWeights:
        spec, names, read = self._spec, self._names, self._checkpoint
        head, hidden = spec.draft_head, spec.hidden_size
        assert head is not None
        layers = len(head.target_layer_ids) or 3
        own = partial(read.layer, 0) if shard is None else partial(shard.cut_layer, 0, partial(read.layer, 0))
        token_ids, rows = self._vocabulary(head.draft_vocab_size, shard)
        lm_head = partial(self._lm_head, head.draft_vocab_size, rows)
        decoder = ModelWeights(
            self._embedding(), [partial(_with_hidden_half, own, head)], read.norm(names.norm, hidden), lm_head
        )
        return DraftHeadWeights(
            decoder=decoder,
            embedding_norm=read.norm(f"{names.layer(0)}.input_layernorm", hidden),
            embedding_projection=_without_bias(_halves(own().qkv)[0]),
            hidden_norm=own().input_norm if head.norm_before_residual else None,
            hidden_projection=None,
            target_projection=read.linear("fc", hidden, layers * head.target_hidden_size, bias=False),
            target_norm=None,
            token_ids=token_ids,
        )

    def check_all_taken(self) -> None:
        """Raises UserError if the checkpoint has other weights than these."""
        self._tensors.check_all_taken()

    def _embedding(self) -> Tensor:
        """Returns the embedding, or that of the target if the head has none."""
        name, spec = f"{self._names.embedding}.weight", self._spec
        if name in self._tensors:
            return self._tensors.take(name, spec.vocab_size, spec.hidden_size)
        of_target = read_config(self._target)
        tensors: Source = open_tensors(self._target, None, self._dtype)
        shape = of_target.spec.vocab_size, of_target.spec.hidden_size
        if shape != (spec.vocab_size, spec.hidden_size):
            raise UserError(
                f"{self._path}: the draft head has no embedding, and that of target {self._target} has the shape"
                f" {[*shape]} instead of {[spec.vocab_size, spec.hidden_size]}; use a head of this target"
            )
        return tensors.take(f"{of_target.names.found_in(tensors).embedding}.weight", *shape)

    def _vocabulary(self, count: int, shard: Shard | None) -> tuple[Tensor | None, Tensor | None]:
        """Returns the token ids of this rank's rows of the LM head, and the rows, -1 for padding. Both are None if the
        LM head has the whole vocabulary in its order and is not sharded."""
        vocab = self._spec.vocab_size
        ids = torch.arange(count)
        if "t2d" in self._tensors:
            self._tensors.take("t2d", vocab, kinds=(torch.bool,))  # follows from d2t
        if "d2t" in self._tensors:
            ids = ids + self._tensors.take("d2t", count, kinds=(torch.int64, torch.int32))
        elif count != vocab:
            raise UserError(f"{self._path}: tensor d2t is missing, and the LM head has {count} of {vocab} tokens")
        if len(ids.unique()) != count or int(ids.min()) < 0 or int(ids.max()) >= vocab:
            raise UserError(f"{self._path}: tensor d2t does not name {count} different tokens in 0..{vocab - 1}")
        if shard is None:
            return (None, None) if torch.equal(ids, torch.arange(vocab)) else (ids, None)
        first = shard.rank * shard.head_rows
        rows = ((ids >= first) & (ids < first + shard.head_rows)).nonzero().squeeze(1)
        padding = torch.full((max(-len(rows) % EIGHT, EIGHT if len(rows) == 0 else 0),), -1)
        return ids[rows], torch.cat((rows, padding))

    def _lm_head(self, count: int, rows: Tensor | None) -> Weight:
        whole = self._checkpoint.linear(self._names.head, count, self._spec.hidden_size, bias=False)
        return whole if rows is None else whole.outputs(rows)


def _halves(weight: Weight) -> tuple[Weight, Weight]:
    """Returns the columns of a projection of [embedding, hidden state] that belong to each of them."""
    size = weight.shape[1] // 2
    columns = torch.arange(2 * size)
    return weight.inputs(columns[:size], size), weight.inputs(columns[size:], size)


def _with_hidden_half(read: Callable[[], LayerWeights], head: DraftHeadSpec) -> LayerWeights:
    """Reads a layer of eagle3 whose QKV has the columns of the hidden state alone."""
    layer = read()
    norm = None if head.norm_before_residual else layer.input_norm
    return replace(layer, qkv=_halves(layer.qkv)[1], input_norm=norm)


def _without_bias(weight: Any) -> Weight:
    return replace(weight, bias=None)
