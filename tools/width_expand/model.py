"""Builds a width-expanded model layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swiftspec.errors import UserError
from swiftspec.model.checkpoint import Checkpoint
from swiftspec.model.checkpoint_files import open_tensors, read_config
from swiftspec.model.config import ModelConfig
from swiftspec.model.config_json import parse_config
from swiftspec.model.float8 import FLOAT8, Fp8KVScale
from swiftspec.model.formats import format_of
from swiftspec.model.formats.int8 import LoadTimeQuantization
from swiftspec.model.loader import NO_QUANTIZATION
from swiftspec.model.shard import Shard
from swiftspec.model.tensor_parallel import TensorParallelGroup
from swiftspec.model.transformer import ModelOps, Transformer
from swiftspec.model.weights import DenseWeight, LayerWeights, ModelWeights, Weight
from tools.width_expand.fill import Filler
from tools.width_expand.maps import FREE, GROUP, LOUD, SILENT, Maps, map_layer, spread
from tools.width_expand.shapes import DTYPES, Kind, grown_config

MASK = -(2.0**22)  # times the normalised constant: below -100 while the residual's root mean square is below 1e3


@dataclass(frozen=True, slots=True)
class Grown:
    """A width-expanded model. `weights` builds the matrices one at a time."""

    small: ModelConfig
    large: ModelConfig
    source: ModelWeights
    maps: Maps
    filler: Filler

    @staticmethod
    def of(path: str | Path, sizes: dict[str, Any], kind: Kind, device: torch.device | str, seed: int) -> Grown:
        """Reads the small model. Raises UserError if it does not fit the shape."""
        small = read_config(path)
        source = Checkpoint(small.spec, open_tensors(path), format_of(small), small.names).read()
        large = parse_config(grown_config(path, sizes, kind))
        new, old = large.spec, small.spec
        if new.vocab_size < old.vocab_size or (new.vocab_size > old.vocab_size and new.hidden_size <= old.hidden_size):
            raise UserError(f"{path}: the vocabulary cannot shrink, and can grow only together with the hidden size")
        if new.tie_word_embeddings and not old.tie_word_embeddings:
            raise UserError(f"{path}: this shape requires tied embeddings, but the LM head is separate")
        if any(size % GROUP for size in (new.hidden_size, new.layer.mlp.intermediate_size, new.layer.attention.q_size)):
            raise UserError(f"the sizes of the shape must be multiples of {GROUP}")
        noise = torch.Generator(device).manual_seed(seed)
        return Grown(small, large, source, map_layer(small, large), Filler(noise, DTYPES[kind], kind == "int4"))

    @property
    def constant(self) -> int | None:
        """Column of the residual stream with the constant, or None if no tokens have to be masked."""
        if self.large.spec.vocab_size == self.small.spec.vocab_size:
            return None
        return int((self.maps.hidden == SILENT).nonzero()[0])

    def weights(self) -> ModelWeights:
        """Returns the weights of the large model, with layers that are built on demand."""
        small, large, known = self.small.spec, self.large.spec, self.small.spec.vocab_size
        constant, filler = self.constant, replace(self.filler, int4=False)
        rows = torch.cat((torch.arange(known), torch.full((large.vocab_size - known,), FREE)))
        columns = self.maps.hidden  # the other entries of a known token's row are zero
        embedding = filler.dense_matrix(DenseWeight(self.source.embedding), rows, columns)
        if constant is not None:
            embedding[:known, constant] = (small.norm_eps * small.hidden_size / 2) ** 0.5
            embedding[known:, constant] = MASK  # not used as an embedding, because these tokens do not occur
        head = embedding
        if not large.tie_word_embeddings:
            columns = self.maps.input.clone()
            if constant is not None:
                columns[constant] = LOUD
            head = filler.dense_matrix(self.source.head(), rows, columns)
            if constant is not None:
                head[known:, constant] = MASK
        layers, norm = self.layers(), self._norm(self.source.norm, 1.0)
        one_by_one = [partial(next, layers)] * len(large.layers)
        return ModelWeights(embedding, one_by_one, norm, lambda: DenseWeight(head))

    def layers(self) -> Iterator[LayerWeights]:
        """Yields all layers of the large model, with those of the small one among them."""
        layers = iter(self.source.layers)
        for number in spread(len(self.small.spec.layers), len(self.large.spec.layers), FREE).tolist():
            yield self._layer(next(layers)() if number >= 0 else None)

    def _layer(self, source: LayerWeights | None) -> LayerWeights:
        matrix, maps = self.filler.matrix, self.maps
        gain = torch.ones(maps.qkv.shape[0])
        small, large = self.small.spec.layer.attention, self.large.spec.layer.attention
        gain[: maps.o.shape[0]] = (large.head_dim / small.head_dim) ** 0.5
        if source is None:
            source, maps = self._nothing(), maps.blank()
        return LayerWeights(
            input_norm=self._norm(source.input_norm, 0.0),
            qkv=matrix(source.qkv, maps.qkv, maps.input, gain),
            o=matrix(source.o, maps.hidden, maps.o),
            mlp_norm=self._norm(source.mlp_norm, 0.0),
            gate_up=matrix(source.gate_up, maps.gate_up, maps.input),
            down=matrix(source.down, maps.hidden, maps.down),
        )

    def _nothing(self) -> LayerWeights:
        """Returns the source of a blank layer: zero biases, and matrices from which no row is copied."""
        hidden, mixer, mlp = self.small.spec.hidden_size, self.small.spec.layer.attention, self.small.spec.layer.mlp

        def weight(rows: int, columns: int, bias: bool) -> Weight:
            return DenseWeight(torch.zeros(rows, columns), torch.zeros(rows) if bias else None)

        return LayerWeights(
            input_norm=torch.ones(hidden),
            qkv=weight(mixer.q_size + 2 * mixer.kv_size, hidden, mixer.qkv_bias),
            o=weight(hidden, mixer.q_size, mixer.o_bias),
            mlp_norm=torch.ones(hidden),
            gate_up=weight(2 * mlp.intermediate_size, hidden, mlp.bias),
            down=weight(hidden, mlp.intermediate_size, mlp.bias),
        )

    def _norm(self, source: Tensor | None, constant: float) -> Tensor:
        """Returns a norm weight expanded to [large hidden size] float32, with `constant` in the column of the
        constant."""
        assert source is not None
        columns = self.maps.hidden
        weight = torch.where(columns < 0, 1.0, source.float()[columns.clamp_min(0)])
        weight *= (self.small.spec.hidden_size / self.large.spec.hidden_size) ** 0.5
        if self.constant is not None:
            weight[self.constant] = constant
        return weight.to(self.filler.device)


def load(
    path: str | Path,
    sizes: dict[str, Any],
    kind: Kind,
    *,
    device: torch.device | str,
    ops: ModelOps,
    max_positions: int,
    dtype: torch.dtype | None = None,
    cache_dtype: torch.dtype | None = None,
    group: TensorParallelGroup | None = None,
    quantization: LoadTimeQuantization = NO_QUANTIZATION,
    seed: int = 0,
) -> Transformer:
    """Builds the width-expanded model on the device with the interface of model/loader.py.

    It writes no file and keeps no second copy. With a `group`, a rank builds one whole layer at a time and keeps its
    shard; equal seeds on devices of one kind give all ranks the same layers.
    """
    grown = Grown.of(path, sizes, kind, device, seed)
    spec, weights = grown.large.spec, grown.weights()
    shard = None if group is None else Shard.of(grown.large, group.rank, group.size)
    weights = quantization.of_weights(weights if shard is None else shard.cut(weights))
    if cache_dtype == FLOAT8:
        mixer = spec.layer.attention
        heads = (mixer.num_heads, mixer.num_kv_heads)
        heads = heads if shard is None else (shard.layers[0].num_heads, shard.layers[0].kv_heads)
        weights = Fp8KVScale(*heads, mixer.head_dim).of_weights(weights)
    return Transformer(
        spec, weights, ops, device, dtype or DTYPES[kind], max_positions, shard=shard, group=group,
        cache_dtype=cache_dtype,
    )  # fmt: skip
