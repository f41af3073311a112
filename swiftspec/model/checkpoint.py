"""Maps the tensors of a Hugging Face checkpoint, by name, to the weights of a model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from swiftspec.model.config import ModelConfig
from swiftspec.model.weights import DenseWeight, LayerWeights, ModelWeights, Weight, fuse_weights

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Source(Protocol):
    """Tensors of a checkpoint by name; `checkpoint_files.Tensors` reads them from disk."""

    folder: Path  # for error messages

    def __contains__(self, name: str, /) -> bool: ...
    def take(self, name: str, /, *shape: int, kinds: tuple[torch.dtype, ...] = FLOATS) -> Tensor:
        """Returns the tensor `name`. Raises UserError if it is missing, its shape is not `shape`, or its dtype is not
        in `kinds`."""
        ...


class Format(Protocol):
    """Storage format of a checkpoint's quantised matrices; the formats are in formats/."""

    @property
    def group_size(self) -> int: ...  # inputs that share a scale
    def linear(self, tensors: Source, module: str, rows: int, columns: int, bias: Tensor | None) -> Weight:
        """Reads the matrix [rows, columns] of the linear layer `module`, such as "model.layers.0.mlp.down_proj"."""
        ...


class Checkpoint:
    """Reader of a model's weights by their Hugging Face names. `layout`: format of the quantised matrices; None if all
    matrices are dense."""

    def __init__(self, config: ModelConfig, tensors: Source, layout: Format | None = None) -> None:
        self.config, self.tensors, self.layout = config, tensors, layout

    def read(self) -> ModelWeights:
        """Returns the weights of the whole model. Its callables read the layers and the LM head when they are
        called."""
        hidden, vocab = self.config.hidden_size, self.config.vocab_size
        layers = [partial(self._layer, f"model.layers.{index}") for index in range(self.config.num_layers)]
        norm = self.tensors.take("model.norm.weight", hidden)
        table = partial(self.tensors.take, "model.embed_tokens.weight", vocab, hidden)
        own = partial(self._linear, "lm_head", vocab, hidden, bias=False)
        head = (lambda: DenseWeight(table())) if self.config.tie_word_embeddings else own
        return ModelWeights(table(), layers, norm, head)

    def _layer(self, prefix: str) -> LayerWeights:
        config, hidden, inner = self.config, self.config.hidden_size, self.config.intermediate_size
        at, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        heads = (("q", q), ("k", kv), ("v", kv))
        qkv = [self._linear(f"{at}.{name}_proj", rows, hidden, config.qkv_bias) for name, rows in heads]
        gate_up = [self._linear(f"{mlp}.{name}_proj", inner, hidden, config.mlp_bias) for name in ("gate", "up")]
        norms = ("input_layernorm", "post_attention_layernorm")
        first, second = (self.tensors.take(f"{prefix}.{name}.weight", hidden) for name in norms)
        o = self._linear(f"{at}.o_proj", hidden, q, config.o_bias)
        down = self._linear(f"{mlp}.down_proj", hidden, inner, config.mlp_bias)
        return LayerWeights(first, fuse_weights(qkv), o, second, fuse_weights(gate_up), down)

    def _linear(self, module: str, rows: int, columns: int, bias: bool) -> Weight:
        """Reads the matrix [rows, columns] of `module`. A quantised checkpoint may have dense matrices, too: those
        whose tensor is named "weight"."""
        shift = self.tensors.take(f"{module}.bias", rows) if bias else None
        if self.layout is None or f"{module}.weight" in self.tensors:
            return DenseWeight(self.tensors.take(f"{module}.weight", rows, columns), shift)
        return self.layout.linear(self.tensors, module, rows, columns, shift)
