"""The decoder: one forward for prefill chunks, autoregressive decoding and trees."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from swiftspec.model.batch import Batch, ForwardOutput
from swiftspec.model.packed_model import FusedModel, LayerCaches, PackedLayer, PackedMlp, PackedModel
from swiftspec.model.spec import ModelSpec
from swiftspec.model.tensor_parallel import TensorParallelGroup
from swiftspec.model.weights import LayerWeights, ModelWeights, Weight


class ModelOps(Protocol):
    """Module of the fused operators that the model calls; swiftspec.backends.reference documents them. Packed weights
    are opaque to the model.

    Contract of every operator: the bits of a row of the result depend on the inputs of that row and on its position,
    never on the other rows of the batch, their number or their slots. Trees, batches and particles are exact because
    of it. The docstring of a backend names the operators that keep it only up to rounding.
    """

    def pack(self, weight: Weight, dtype: torch.dtype, device: torch.device | str, /) -> Any: ...
    def pack_norm(self, weight: Tensor, eps: float, dtype: torch.dtype, device: torch.device | str, /) -> Any: ...
    def rope_tables(
        self, rope: Any, head_dim: int, length: int, dtype: torch.dtype, device: torch.device | str, /
    ) -> tuple[Tensor, Tensor]: ...
    def fuse(self, stack: PackedModel, /) -> FusedModel | None: ...
    def prepare(self, batch: Batch, cache: Any, cos: Tensor, sin: Tensor, num_heads: int, /) -> Any: ...
    def embed(self, tokens: Tensor, weight: Tensor, /) -> Tensor: ...
    def norm_linear(self, x: Tensor, norm: Any, packed: Any, /) -> Tensor: ...
    def tree_attention(self, qkv: Tensor, plan: Any, layer: int, qk_norm: Any, /) -> Tensor: ...
    def linear_residual(
        self, x: Tensor, packed: Any, residual: Tensor, reduce: Callable[[Tensor], Tensor] | None, /
    ) -> Tensor: ...
    def mlp(
        self, hidden: Tensor, norm: Any, weights: PackedMlp, residual: Tensor,
        reduce: Callable[[Tensor], Tensor] | None, /,
    ) -> Tensor: ...  # fmt: skip
    def norm_head(self, x: Tensor, norm: Any, packed: Any, /) -> Tensor: ...
    def mask_outputs(self, packed: Any, outputs: Sequence[int], device: torch.device | str, /) -> Any: ...


class ShardInfo(Protocol):
    """Sizes of one rank's shard, including padding; `shard.Shard` implements it."""

    @property
    def num_heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_rows(self) -> int: ...


class Transformer:
    """A decoder whose operators come from the module `ops`.

    `max_positions`: length of the RoPE tables. `shard`, `group`: given if the model is sharded. `weights` are then one
    rank's, `shard` has their sizes, and `group` does the all-reduces. Allocate the KV cache with this object's
    `kv_heads` and `cache_dtype`. `hidden_layers`: the layers, ascending from 0, after which every forward keeps the
    hidden states.
    """

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, ops: ModelOps, device: torch.device | str, dtype: torch.dtype,
        max_positions: int, *, shard: ShardInfo | None = None, group: TensorParallelGroup | None = None,
        cache_dtype: torch.dtype | None = None, hidden_layers: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        if sorted({*hidden_layers} & {*range(len(spec.layers))}) != [*hidden_layers]:
            raise ValueError(f"hidden_layers: {hidden_layers} are not ascending layers below {len(spec.layers)}")
        mixer = spec.layer.mixer
        self.spec, self.device, self.dtype = spec, torch.device(device), dtype
        self.num_heads = mixer.num_heads if shard is None else shard.num_heads
        self.kv_heads = mixer.num_kv_heads if shard is None else shard.kv_heads
        self.head_rows = spec.vocab_size if shard is None else shard.head_rows  # of this rank, including padding
        self.group, self._ops, self.cache_dtype = group, ops, cache_dtype or dtype
        self.hidden_layers = hidden_layers
        cos, sin = ops.rope_tables(mixer.rope, mixer.head_dim, max_positions, dtype, device)
        head = ops.pack(weights.head(), dtype, device)  # first, because packing needs the largest matrix twice
        embedding, layers = weights.embedding.to(device, dtype), [self._pack(read()) for read in weights.layers]
        norm = self._pack_norm(weights.norm)
        self.stack = PackedModel(
            embedding, layers, norm, head, cos, sin, self.num_heads, self.kv_heads, group, hidden_layers
        )
        self.fused: Any = ops.fuse(self.stack)  # a `FusedModel` or None; native executors call further methods of it

    def with_masked_tokens(self, tokens: Sequence[int]) -> Transformer:
        """Returns a model on the same weights whose logits of `tokens` are -inf in every forward, whatever executes it;
        the other logits keep their bits. The tokens may lie outside this rank's part of the vocabulary."""
        if not tokens:
            return self
        first = 0 if self.group is None else self.group.rank * self.head_rows
        own = [token - first for token in tokens if 0 <= token - first < self.head_rows]
        masked = copy.copy(self)
        masked.stack = replace(self.stack, head=self._ops.mask_outputs(self.stack.head, own, self.device))
        masked.fused = self._ops.fuse(masked.stack)
        return masked

    def _pack(self, layer: LayerWeights) -> PackedLayer:
        first, second = self._pack_norm(layer.input_norm), self._pack_norm(layer.post_norm)
        matrices = (layer.qkv, layer.o, layer.gate_up, layer.down)
        qkv, o, gate_up, down = (self._ops.pack(matrix, self.dtype, self.device) for matrix in matrices)
        qk_norm = None
        if layer.q_norm is not None and layer.k_norm is not None:
            per_head = (layer.q_norm.expand(self.num_heads, -1), layer.k_norm.expand(self.kv_heads, -1))
            qk_norm = self._pack_norm(torch.cat(per_head))
        return PackedLayer(first, qkv, o, second, PackedMlp(gate_up, down), qk_norm)

    def _pack_norm(self, weight: Tensor) -> Any:
        return self._ops.pack_norm(weight, self.spec.norm_eps, self.dtype, self.device)

    @torch.no_grad()
    def forward(self, batch: Batch, cache: LayerCaches, *, head: bool = True) -> ForwardOutput:
        """Runs a forward, without the LM head if `head` is false, and writes the states of its rows to `cache`.

        In a group the logits [rows, head_rows] are those of this rank's part of the vocabulary; they are not gathered.
        """
        if self.fused is not None:
            return self.fused.forward(batch, cache.kv, head)
        hidden, kept = self._run_layers(batch, cache)
        logits = self._ops.norm_head(hidden, self.stack.norm, self.stack.head) if head else None
        return ForwardOutput(logits, torch.stack(kept, 1) if kept else None)

    # inference mode saves 1 us per operator; the head is outside, so that outputs are ordinary tensors
    @torch.inference_mode()
    def _run_layers(self, batch: Batch, cache: LayerCaches) -> tuple[Tensor, list[Tensor]]:
        """Returns the hidden states [rows, hidden] after the last layer, and those after each of `hidden_layers`."""
        ops, stack = self._ops, self.stack
        reduce = None if self.group is None else self.group.all_reduce
        plan = ops.prepare(batch, cache.kv, stack.cos, stack.sin, self.num_heads)
        hidden = ops.embed(batch.tokens, stack.embedding)
        kept: list[Tensor] = []
        for index, layer in enumerate(stack.layers):
            qkv = ops.norm_linear(hidden, layer.input_norm, layer.qkv)
            mixed = ops.tree_attention(qkv, plan, index, layer.qk_norm)
            hidden = ops.linear_residual(mixed, layer.o, hidden, reduce)
            hidden = ops.mlp(hidden, layer.post_norm, layer.mlp, hidden, reduce)
            if index in stack.hidden_layers:
                kept.append(hidden)
        return hidden, kept
