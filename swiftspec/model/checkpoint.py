"""Maps the tensors of a Hugging Face checkpoint, by name, to the weights of a model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from swiftspec.model.spec import LayerSpec, ModelSpec
from swiftspec.model.tensor_names import HF_NAMES, TensorNames
from swiftspec.model.weights import DenseWeight, LayerWeights, ModelWeights, Weight, fuse_weights

SCALES = ("weight_scale", "weight_scale_inv")  # of a tensor "weight" with int8 or float8 codes
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Source(Protocol):
    """Tensors of a checkpoint by name; `checkpoint_files.Tensors` reads them from disk."""

    folder: Path  # for error messages

    def __contains__(self, name: str, /) -> bool: ...
    def shape_of(self, name: str, /) -> tuple[int, ...]:
        """Returns the shape of the tensor `name`. Raises UserError if it is missing."""
        ...

    def take(self, name: str, /, *shape: int, kinds: tuple[torch.dtype, ...] = FLOATS) -> Tensor:
        """Returns the tensor `name`. Raises UserError if it is missing, its shape is not `shape`, or its dtype is not
        in `kinds`."""
        ...


class Format(Protocol):
    """Storage format of a checkpoint's quantised matrices; the formats are in formats/."""

    @property
    def group_size(self) -> int: ...  # inputs that share a scale
    @property
    def is_int4(self) -> bool: ...  # whether matrices are `Int4Weight`s, which operators on a GPU keep as they are
    def linear(self, tensors: Source, module: str, rows: int, columns: int, bias: Tensor | None) -> Weight:
        """Reads the matrix [rows, columns] of the linear layer `module`, such as "model.layers.0.mlp.down_proj"."""
        ...


class Checkpoint:
    """Reader of a model's weights by their Hugging Face names. `layout`: format of the quantised matrices; None if all
    matrices are dense."""

    def __init__(
        self, spec: ModelSpec, tensors: Source, layout: Format | None = None, names: TensorNames = HF_NAMES
    ) -> None:
        self.spec, self.tensors, self.layout, self.names = spec, tensors, layout, names

    def read(self) -> ModelWeights:
        """Returns the weights of the whole model. Its callables read the layers and the LM head when they are
        called."""
        spec, names, hidden, vocab = self.spec, self.names, self.spec.hidden_size, self.spec.vocab_size
        layers = [partial(self._layer, names.layer(index), layer) for index, layer in enumerate(spec.layers)]
        table = self.tensors.take(f"{names.embedding}.weight", vocab, hidden)
        own = partial(self._linear, names.head, vocab, hidden, bias=False)
        head = self._tied_head if spec.tie_word_embeddings else own
        return ModelWeights(table, layers, self._norm(names.norm, hidden), head)

    def _tied_head(self) -> Weight:
        """Returns the LM head of a model with tied embeddings: the embedding, unless the checkpoint has a different
        head, as fine-tuned models may. transformers uses that head, too."""
        vocab, hidden = self.spec.vocab_size, self.spec.hidden_size
        tied = self._linear(self.names.embedding, vocab, hidden, bias=False)
        if f"{self.names.head}.weight" not in self.tensors or not isinstance(tied, DenseWeight):
            return tied
        own = self.tensors.take(f"{self.names.head}.weight", vocab, hidden)
        return tied if own.dtype == tied.weight.dtype and torch.equal(own, tied.weight) else DenseWeight(own)

    def _layer(self, prefix: str, layer: LayerSpec) -> LayerWeights:
        mixer, mlp, names, hidden = layer.mixer, layer.mlp, self.names, self.spec.hidden_size
        heads = ((names.q, mixer.q_size), (names.k, mixer.kv_size), (names.v, mixer.kv_size))
        qkv = [self._linear(f"{prefix}.{name}", rows, hidden, mixer.qkv_bias) for name, rows in heads]
        halves = (names.gate, names.up)
        gate_up = [self._linear(f"{prefix}.{name}", mlp.intermediate_size, hidden, mlp.bias) for name in halves]
        q_norm = k_norm = None
        if mixer.qk_norm:
            q_norm, k_norm = (self._norm(f"{prefix}.{name}", mixer.head_dim) for name in (names.q_norm, names.k_norm))
        return LayerWeights(
            input_norm=self._norm(f"{prefix}.{names.input_norm}", hidden),
            qkv=fuse_weights(qkv),
            o=self._linear(f"{prefix}.{names.o}", hidden, mixer.q_size, mixer.o_bias),
            post_norm=self._norm(f"{prefix}.{names.post_norm}", hidden),
            gate_up=fuse_weights(gate_up),
            down=self._linear(f"{prefix}.{names.down}", hidden, mlp.intermediate_size, mlp.bias),
            q_norm=q_norm,
            k_norm=k_norm,
        )

    def _norm(self, module: str, size: int) -> Tensor:
        return self.tensors.take(f"{module}.weight", size)

    def _linear(self, module: str, rows: int, columns: int, bias: bool) -> Weight:
        """Reads the matrix [rows, columns] of `module`. A quantised checkpoint may have dense matrices, too: those
        whose tensor is named "weight" and has no scale."""
        shift = self.tensors.take(f"{module}.bias", rows) if bias else None
        scaled = any(f"{module}.{scale}" in self.tensors for scale in SCALES)
        if self.layout is None or (f"{module}.weight" in self.tensors and not scaled):
            return DenseWeight(self.tensors.take(f"{module}.weight", rows, columns), shift)
        return self.layout.linear(self.tensors, module, rows, columns, shift)
