"""The decoder: one forward for prefill chunks, autoregressive decoding and trees."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from swiftspec.model.batch import Batch, ForwardOutput
from swiftspec.model.packed_model import (
    AttentionOptions,
    DeltaShape,
    DeltaTensors,
    FusedModel,
    LayerCaches,
    PackedAttention,
    PackedDelta,
    PackedLayer,
    PackedMixture,
    PackedMlp,
    PackedModel,
    PackedPerLayer,
    PackedPerLayerPart,
    ProjectionNorm,
)
from swiftspec.model.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from swiftspec.model.tensor_parallel import TensorParallelGroup
from swiftspec.model.weights import DeltaWeights, LayerWeights, ModelWeights, PerLayerWeights, Weight


class ModelOps(Protocol):
    """The operators of a backend that the model calls; swiftspec.backends.reference documents them. Packed weights are
    opaque to the model. `check_supported` of a backend refuses models that need an operator which it does not have.

    Contract of every operator: the bits of a row of the result depend on the inputs of that row and on its position,
    never on the other rows of the batch, their number or their slots. Trees, batches and particles are exact because
    of it. The docstring of a backend names the operators that keep it only up to rounding.
    """

    @property
    def FLOAT32_STREAM(self) -> bool: ...  # bfloat16 models have a residual stream in float32
    def pack(self, weight: Weight, dtype: torch.dtype, device: torch.device | str, /) -> Any: ...
    def pack_qkv(self, weight: Weight, head_dim: int, dtype: torch.dtype, device: torch.device | str, /) -> Any: ...
    def pack_norm(self, weight: Tensor, eps: float, dtype: torch.dtype, device: torch.device | str, /) -> Any: ...
    def rope_tables(
        self, rope: Any, head_dim: int, length: int, dtype: torch.dtype, device: torch.device | str, /
    ) -> tuple[Tensor, Tensor]: ...
    def fuse(self, stack: PackedModel, /) -> FusedModel | None: ...
    def prepare(
        self, batch: Batch, cache: Any, cos: Tensor, sin: Tensor, num_heads: int, options: AttentionOptions, /
    ) -> Any: ...
    def embed(self, tokens: Tensor, weight: Tensor, multiplier: float, /) -> Tensor: ...
    def norm_linear(self, x: Tensor, norm: Any, packed: Any, /) -> Tensor: ...
    def tree_attention(self, qkv: Tensor, plan: Any, layer: int, qk_norm: Any, sinks: Tensor | None, /) -> Tensor: ...
    def qkv_attention(
        self, x: Tensor, norm: Any, packed: Any, plan: Any, layer: int, qk_norm: Any, sinks: Tensor | None, /
    ) -> Tensor: ...
    def linear_residual(
        self,
        x: Tensor,
        packed: Any,
        residual: Tensor,
        reduce: Callable[[Tensor], Tensor] | None,
        norm: Any,
        multiplier: float,
        /,
    ) -> Tensor: ...
    def mlp(
        self,
        hidden: Tensor,
        norm: Any,
        weights: Any,
        residual: Tensor,
        /,
        reduce: Callable[[Tensor], Tensor] | None = None,
        output_norm: Any = None,
        multiplier: float = 1.0,
    ) -> Tensor: ...
    def norm_head(self, x: Tensor, norm: Any, packed: Any, multiplier: float, softcap: float | None, /) -> Tensor: ...
    def mask_outputs(self, packed: Any, outputs: Sequence[int], device: torch.device | str, /) -> Any: ...
    def pack_mixture(
        self, weights: LayerWeights, spec: MlpSpec, dtype: torch.dtype, device: torch.device | str, /
    ) -> PackedMixture: ...
    def prefill_chunk(self) -> AbstractContextManager[None]: ...
    def prepare_delta(self, batch: Batch, cache: DeltaTensors, /) -> Any: ...
    def gated_delta(
        self, projected: Tensor, rates: Tensor, plan: Any, layer: int, weights: PackedDelta, /
    ) -> Tensor: ...
    def multiply_sigmoid(self, x: Tensor, gate: Tensor, /) -> Tensor: ...
    def per_layer_embeddings(self, tokens: Tensor, hidden: Tensor, weights: PackedPerLayer, /) -> Tensor: ...
    def add_per_layer(self, hidden: Tensor, embedding: Tensor, weights: PackedPerLayerPart, /) -> Tensor: ...


class HeadCounts(Protocol):
    """Heads of one rank's shard of a layer, including padding: query and KV heads of attention, value and key heads of
    a delta layer. `shard.LayerShard` implements it."""

    @property
    def num_heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def counted(self) -> Tensor: ...


class ShardInfo(Protocol):
    """Sizes of one rank's shard, including padding; `shard.Shard` implements it."""

    @property
    def layers(self) -> Sequence[HeadCounts]: ...
    @property
    def head_rows(self) -> int: ...


class Transformer:
    """A decoder whose operators come from the backend `ops`.

    `dtype` is that of dense weights and, without `cache_dtype`, of the KV cache. The residual stream and all that is
    computed from it between the products have the dtype `stream_dtype`.
    `max_positions`: length of the RoPE tables. `shard`, `group`: given if the model is sharded. `weights` are then one
    rank's, `shard` has their sizes, and `group` does the all-reduces. Allocate the KV caches with this object's
    `cache_shapes` and `cache_dtype`. `hidden_layers`: the layers, ascending from 0, after which every forward keeps the
    hidden states.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        ops: ModelOps,
        device: torch.device | str,
        dtype: torch.dtype,
        max_positions: int,
        *,
        shard: ShardInfo | None = None,
        group: TensorParallelGroup | None = None,
        cache_dtype: torch.dtype | None = None,
        hidden_layers: tuple[int, ...] = (),
        stream_dtype: torch.dtype | None = None,
    ) -> None:
        """`stream_dtype`: None: `dtype`."""
        if sorted({*hidden_layers} & {*range(len(spec.layers))}) != [*hidden_layers]:
            raise ValueError(f"hidden_layers: {hidden_layers} are not ascending layers below {len(spec.layers)}")
        self.spec, self.device, self.dtype, self.max_positions = spec, torch.device(device), dtype, max_positions
        self.head_rows = spec.vocab_size if shard is None else shard.head_rows  # of this rank, including padding
        self.group, self._ops, self.cache_dtype = group, ops, cache_dtype or dtype
        self.stream_dtype = stream_dtype or dtype
        self.hidden_layers, self._shard = hidden_layers, shard
        kinds = list(dict.fromkeys(mixer.kind for mixer in spec.attention_mixers))
        attention = [self._attention(kind) for kind in kinds]
        # by layer: index of its kind of attention; of a delta layer -1
        kind_of = [
            kinds.index(layer.mixer.kind) if isinstance(layer.mixer, AttentionSpec) else -1 for layer in spec.layers
        ]
        cache_layers, cache_sizes = _cache_layers(spec, [-1 if i < 0 else attention[i].cache for i in kind_of])
        head = ops.pack(weights.head(), dtype, device)  # first, because packing needs the largest matrix twice
        embedding, layers = weights.embedding.to(device, dtype), list[PackedLayer]()
        for index, read in enumerate(weights.layers):
            layer = spec.layers[index]
            kind = max(kind_of[index], 0)
            layers.append(self._pack(read(), layer, attention[kind], (kind, cache_layers[index])))
        self.stack = PackedModel(
            embedding=embedding,
            layers=layers,
            norm=self._pack_norm(weights.norm),
            head=head,
            attention=attention,
            group=group,
            hidden_layers=hidden_layers,
            embedding_multiplier=float(torch.tensor(spec.embedding_multiplier, dtype=dtype)),
            logit_multiplier=spec.logit_multiplier,
            logit_softcap=spec.logit_softcap,
            delta=self._delta_shape(),
            per_layer=None if weights.per_layer is None else self._pack_per_layer(weights.per_layer),
        )
        self.fused: Any = self._fuse()  # a `FusedModel` or None; native executors call further methods of it
        # by KV cache: number of layers, KV heads of this rank, head dimension
        self.cache_shapes = tuple(
            (cache_sizes[place], next(a.kv_heads for a in attention if a.cache == place), head_dim)
            for place, (_, head_dim) in enumerate(spec.cache_shapes)
        )
        # the number of layers up to the last one that writes to a cache
        self._writing_layers = max(number for number, layer in enumerate(spec.layers, 1) if layer.writes_cache)

    def _fuse(self) -> FusedModel | None:
        """Returns the model as one native call, if the operators have that."""
        return self._ops.fuse(self.stack)

    def with_masked_tokens(self, tokens: Sequence[int]) -> Transformer:
        """Returns a model on the same weights whose logits of `tokens` are -inf in every forward, whatever executes it;
        the other logits keep their bits. The tokens may lie outside this rank's part of the vocabulary."""
        if not tokens:
            return self
        masked, rows = copy.copy(self), self._rows_of(tokens)
        masked.stack = replace(self.stack, head=self._ops.mask_outputs(self.stack.head, rows, self.device))
        masked.fused = masked._fuse()
        return masked

    @property
    def first_token(self) -> int:
        """The token of the first column of this rank's logits."""
        return 0 if self.group is None else self.group.rank * self.head_rows

    def _rows_of(self, tokens: Sequence[int]) -> list[int]:
        """Returns the rows of this rank's LM head that belong to `tokens`."""
        return [token - self.first_token for token in tokens if 0 <= token - self.first_token < self.head_rows]

    @property
    def kv_heads(self) -> int:
        """KV heads of this rank in the layers of the first cache, including padding."""
        return self.stack.attention[0].kv_heads

    @property
    def delta_shape(self) -> DeltaShape | None:
        """Sizes of the delta layers of this rank; None if no layer is one."""
        return self.stack.delta

    def _delta_shape(self) -> DeltaShape | None:
        mixers = self.spec.delta_mixers
        if not mixers:
            return None
        first = mixers[0]
        k_heads, v_heads = first.num_k_heads, first.num_v_heads
        if self._shard is not None:
            part = self._shard.layers[[layer.mixer for layer in self.spec.layers].index(first)]
            k_heads, v_heads = part.kv_heads, part.num_heads
        return DeltaShape(
            layers=len(mixers),
            k_heads=k_heads,
            v_heads=v_heads,
            k_head_dim=first.k_head_dim,
            v_head_dim=first.v_head_dim,
            conv_size=2 * k_heads * first.k_head_dim + v_heads * first.v_head_dim,
            conv_width=first.conv_width,
        )

    def _attention(self, mixer: AttentionSpec) -> PackedAttention:
        """Returns the tables and options of the layers with this mixer."""
        spec, heads, kv_heads, counted = self.spec, mixer.num_heads, mixer.num_kv_heads, None
        if self._shard is not None:
            part = next(p for p, each in zip(self._shard.layers, spec.layers, strict=True) if each.mixer == mixer)
            heads, kv_heads, counted = part.num_heads, part.kv_heads, part.counted.to(self.device)
        cos, sin = self._ops.rope_tables(mixer.rope, mixer.head_dim, self.max_positions, self.stream_dtype, self.device)
        scale = whole = None
        if mixer.query_scale_beta:
            periods = torch.arange(self.max_positions, dtype=torch.float32) / mixer.rope.original_max_position
            scale = (1 + mixer.query_scale_beta * (1 + periods.floor()).log()).to(self.device)
        if mixer.qk_norm == "projection":
            reduce = None if self.group is None else self.group.all_reduce
            whole = ProjectionNorm(mixer.q_size, mixer.kv_size, counted, reduce)
        after = mixer.norm_after_rope or None
        options = AttentionOptions(mixer.window, mixer.scale, mixer.softcap, scale, whole, after)
        cache = spec.cache_shapes.index((mixer.num_kv_heads, mixer.head_dim))
        return PackedAttention(
            cos=cos,
            sin=sin,
            num_heads=heads,
            kv_heads=kv_heads,
            options=options,
            cache=cache,
            gate_size=heads * mixer.head_dim if mixer.output_gate else 0,
        )

    def _pack(
        self, layer: LayerWeights, spec: LayerSpec, attention: PackedAttention, place: tuple[int, int]
    ) -> PackedLayer:
        """`place`: kind of attention, index in its KV cache or in the delta cache."""
        o = self._ops.pack(layer.o, self.dtype, self.device)
        if isinstance(spec.mixer, AttentionSpec):
            qkv = self._ops.pack_qkv(layer.qkv, spec.mixer.head_dim, self.dtype, self.device)
        else:
            qkv = self._ops.pack(layer.qkv, self.dtype, self.device)
        wide = torch.promote_types(self.dtype, torch.float32)
        return PackedLayer(
            input_norm=self._pack_norm(layer.input_norm),
            qkv=qkv,
            o=o,
            mlp_norm=self._pack_norm(layer.mlp_norm),
            mlp=self._pack_mlp(layer, spec.mlp),
            qk_norm=self._pack_head_norms(layer, attention),
            mixer_output_norm=self._pack_norm(layer.mixer_output_norm),
            mlp_output_norm=self._pack_norm(layer.mlp_output_norm),
            residual_multiplier=spec.residual_multiplier,
            output_scale=None if layer.output_scale is None else layer.output_scale.to(self.device, self.dtype),
            attention=place[0],
            cache_layer=place[1],
            delta=None if layer.delta is None else self._pack_delta(layer.delta),
            sinks=None if layer.sinks is None else layer.sinks.to(self.device, wide, copy=True).contiguous(),
            per_layer=self._pack_per_layer_part(layer, spec.mlp),
        )

    def _pack_per_layer(self, weights: PerLayerWeights) -> PackedPerLayer:
        size, hidden = self.spec.per_layer_size, self.spec.hidden_size
        # the norm of x / sqrt(hidden) with epsilon e is that of x with epsilon e hidden
        eps = self.spec.norm_eps * hidden
        return PackedPerLayer(
            table=weights.table.to(self.device, self.dtype),
            multiplier=float(torch.tensor(size**0.5, dtype=self.dtype)),
            projection=self._ops.pack(weights.projection, self.dtype, self.device),
            norm=self._ops.pack_norm(weights.norm.to(self.dtype), eps, self.dtype, self.device),
        )

    def _pack_per_layer_part(self, layer: LayerWeights, mlp: MlpSpec) -> PackedPerLayerPart | None:
        if layer.per_layer_gate is None or layer.per_layer_projection is None:
            return None
        matrices = layer.per_layer_gate, layer.per_layer_projection
        gate, projection = (self._ops.pack(matrix, self.dtype, self.device) for matrix in matrices)
        return PackedPerLayerPart(gate, projection, self._pack_norm(layer.per_layer_norm), mlp.activation)

    def _pack_delta(self, weights: DeltaWeights) -> PackedDelta:
        wide = torch.promote_types(self.dtype, torch.float32)
        conv, log, bias = (part.to(self.device, wide) for part in (weights.conv, weights.decay_log, weights.decay_bias))
        return PackedDelta(
            rates=self._ops.pack(weights.rates, self.dtype, self.device),
            conv=conv.T.contiguous(),
            decay_factor=-log.exp(),
            decay_bias=bias,
            norm=self._ops.pack_norm(weights.norm.to(self.dtype), self.spec.norm_eps, self.dtype, self.device),
        )

    def _pack_mlp(self, layer: LayerWeights, spec: MlpSpec) -> PackedMlp | PackedMixture:
        if spec.experts is not None:
            return self._ops.pack_mixture(layer, spec, self.dtype, self.device)
        gate_up, down = (self._ops.pack(matrix, self.dtype, self.device) for matrix in (layer.gate_up, layer.down))
        return PackedMlp(gate_up, down, spec.activation)

    def _pack_head_norms(self, layer: LayerWeights, attention: PackedAttention) -> Any:
        if layer.q_norm is None:
            return None
        kv_heads = attention.kv_heads
        norms = (layer.q_norm, attention.num_heads), (layer.k_norm, kv_heads), (layer.v_norm, kv_heads)
        return self._pack_norm(torch.cat([norm.expand(heads, -1) for norm, heads in norms if norm is not None]))

    def _pack_norm(self, weight: Tensor | None) -> Any:
        if weight is None:
            return None
        if not self.spec.norm_unit_offset:  # 1 + weight is not rounded to the dtype of the model
            weight = weight.to(self.dtype)
        return self._ops.pack_norm(weight, self.spec.norm_eps, self.dtype, self.device)

    @torch.no_grad()
    def forward(self, batch: Batch, cache: LayerCaches, *, head: bool = True) -> ForwardOutput:
        """Runs a forward, without the LM head if `head` is false, and writes the states of its rows to `cache`. If
        nothing reads the output of the last layers, those after the last one that writes to a cache are skipped.

        In a group the logits [rows, head_rows] are those of this rank's part of the vocabulary; they are not gathered.
        """
        if self.fused is not None:
            return self.fused.forward(batch, cache, head)
        stack = self.stack
        with nullcontext() if batch.chain is None else self._ops.prefill_chunk():
            hidden, kept = self._run_layers(batch, cache, head=head)
        logits = None
        if head:
            logits = self._ops.norm_head(hidden, stack.norm, stack.head, stack.logit_multiplier, stack.logit_softcap)
        return ForwardOutput(logits, torch.stack(kept, 1) if kept else None)

    # inference mode saves 1 us per operator; the head is outside, so that outputs are ordinary tensors
    @torch.inference_mode()
    def _run_layers(self, batch: Batch, cache: LayerCaches, *, head: bool = True) -> tuple[Tensor, list[Tensor]]:
        """Returns the hidden states [rows, hidden] after the last layer, and those after each of `hidden_layers`.
        `head`: whether the LM head reads the former; otherwise they may be those after an earlier layer."""
        stack = self.stack
        hidden = self._ops.embed(batch.tokens, stack.embedding, 1.0).to(self.stream_dtype)
        if stack.embedding_multiplier != 1:
            hidden = hidden.mul_(stack.embedding_multiplier)
        count = len(stack.layers) if head or stack.hidden_layers else self._writing_layers
        return self._run_layers_on(hidden, batch, cache, count=count)

    def _run_layers_on(
        self,
        hidden: Tensor,
        batch: Batch,
        cache: LayerCaches,
        first_qkv: Tensor | None = None,
        count: int | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """As `_run_layers`. `hidden` [rows, hidden]: input of the first layer. `first_qkv`: is added to the queries,
        keys and values of the first layer. `count`: number of layers, the first ones; None: all."""
        ops, stack = self._ops, self.stack
        reduce = None if self.group is None else self.group.all_reduce
        plans = [self._prepare(kind, batch, cache) for kind in stack.attention]
        delta_plan = None if stack.delta is None else ops.prepare_delta(batch, cache.delta)
        embeddings = None
        if stack.per_layer is not None:
            embeddings = ops.per_layer_embeddings(batch.tokens, hidden, stack.per_layer)
        kept: list[Tensor] = []
        for index, layer in enumerate(stack.layers[:count]):
            if layer.delta is not None:
                qkv = ops.norm_linear(hidden, layer.input_norm, layer.qkv)
                rates = ops.norm_linear(hidden, layer.input_norm, layer.delta.rates)
                mixed = ops.gated_delta(qkv, rates, delta_plan, layer.cache_layer, layer.delta)
            else:
                mixed = self._attend(hidden, plans[layer.attention], layer, first_qkv if index == 0 else None)
            times = layer.residual_multiplier
            hidden = ops.linear_residual(mixed, layer.o, hidden, reduce, layer.mixer_output_norm, times)
            hidden = ops.mlp(
                hidden,
                layer.mlp_norm,
                layer.mlp,
                hidden,
                reduce=reduce,
                output_norm=layer.mlp_output_norm,
                multiplier=times,
            )
            if embeddings is not None and layer.per_layer is not None:
                hidden = ops.add_per_layer(hidden, embeddings[:, index], layer.per_layer)
            if layer.output_scale is not None:
                hidden = hidden * layer.output_scale
            if index in stack.hidden_layers:
                kept.append(hidden)
        return hidden, kept

    def _prepare(self, kind: PackedAttention, batch: Batch, cache: LayerCaches) -> Any:
        """Prepares the attention of the layers of one kind."""
        return self._ops.prepare(batch, cache.kinds[kind.cache], kind.cos, kind.sin, kind.num_heads, kind.options)

    def _attend(self, hidden: Tensor, plan: Any, layer: PackedLayer, added: Tensor | None) -> Tensor:
        """Returns the output of attention, times its gate if it has one. `added`: to queries, keys and values."""
        ops, count = self._ops, self.stack.attention[layer.attention].gate_size
        last = layer.cache_layer, layer.qk_norm, layer.sinks
        if count == 0 and added is None:
            return ops.qkv_attention(hidden, layer.input_norm, layer.qkv, plan, *last)
        qkv = ops.norm_linear(hidden, layer.input_norm, layer.qkv)
        if added is not None:
            qkv = qkv + added
        if count == 0:
            return ops.tree_attention(qkv, plan, *last)
        qkv, gate = qkv.split((qkv.shape[1] - count, count), 1)
        return ops.multiply_sigmoid(ops.tree_attention(qkv, plan, *last), gate)


def _cache_layers(spec: ModelSpec, caches: Sequence[int]) -> tuple[list[int], Counter[int]]:
    """Returns the index of each layer in its cache, and the number of layers of each cache. A shared KV layer has the
    index of the layer whose keys and values it shares. `caches`: the index of each layer's cache."""
    found, sizes, latest = list[int](), Counter[int](), dict[AttentionSpec, int]()
    for layer, cache in zip(spec.layers, caches, strict=True):
        mixer = layer.mixer
        if isinstance(mixer, AttentionSpec) and mixer.shares_kv:
            found.append(latest[mixer.kind])
            continue
        if isinstance(mixer, AttentionSpec):
            latest[mixer] = sizes[cache]
        found.append(sizes[cache])
        sizes[cache] += 1
    return found, sizes
