"""Decoder forward as one native call instead of one call per operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cpu.shm import ShmCollectives
from swiftspec.model.batch import ForwardOutput
from swiftspec.model.packed_model import (
    AttentionOptions,
    DeltaShape,
    DeltaTensors,
    LayerCaches,
    PackedAttention,
    PackedDelta,
    PackedLayer,
    PackedMixture,
    PackedMlp,
    PackedModel,
    PackedPerLayer,
    PackedPerLayerPart,
)

if TYPE_CHECKING:
    from swiftspec.config import PopulationConfig
    from swiftspec.model.batch import Batch


class HostDecoder:
    """A packed model whose forward is one native call. Buffers grow to the largest batch. Not thread-safe."""

    def __init__(self, stack: PackedModel) -> None:
        self._group, self.num_logits = stack.group, stack.head.outputs
        self._hidden_shape = len(stack.hidden_layers), stack.embedding.shape[1]
        self._dtype = stack.attention[0].cos.dtype  # of the residual stream
        shared: ShmCollectives | None = None if stack.group is None else stack.group.memory
        self._native = _C.Decoder(
            embedding=stack.embedding,
            embedding_multiplier=stack.embedding_multiplier,
            kinds=[_kind_args(kind) for kind in stack.attention],
            norm=stack.norm.weight,
            eps=stack.norm.eps,
            head=stack.head.native,
            logit_multiplier=stack.logit_multiplier,
            logit_softcap=stack.logit_softcap,
            layers=[_layer_args(layer) for layer in stack.layers],
            group=None if shared is None else shared.native,
            timeout_s=0.0 if shared is None else shared.timeout_s,
            hidden_layers=[*stack.hidden_layers],
            delta=None if stack.delta is None else _delta_shape_args(stack.delta),
            per_layer=None if stack.per_layer is None else _per_layer_args(stack.per_layer),
        )

    def rounds(self, cache: LayerCaches) -> _C.Rounds:
        """Returns native expansion and verification on the sequences of a cache."""
        return _C.Rounds(self._native, _cache_args(cache))

    @staticmethod
    def tree(arrays: Sequence[NDArray]) -> _C.Tree:
        """Returns a native draft tree on `arrays` of a `DraftTree`: token, parent, slot, logprob, visible, sizes."""
        return _C.Tree(*arrays)

    def population(
        self,
        cache: LayerCaches,
        draft: HostDecoder,
        draft_cache: LayerCaches,
        tensors: Sequence[Tensor],
        config: PopulationConfig,
    ) -> _C.Population:
        """Returns native rounds of a population with this model as target. `tensors`: `GroupRound.tensors`."""
        return _C.Population(
            draft=draft._native,
            draft_cache=_cache_args(draft_cache),
            target=self._native,
            target_cache=_cache_args(cache),
            tensors=[*tensors],
            steps=config.smc_draft_tokens,
            power=config.power,
            threshold=config.ess_threshold,
            deferred_bonus=config.deferred_bonus,
        )

    def hidden_states(self, rows: int) -> Tensor | None:
        """Returns the hidden states [rows, hidden layers, hidden size] of the first `rows` rows of the last forward,
        that of a native round included, or None if the model keeps none."""
        if self._hidden_shape[0] == 0:
            return None
        out = torch.empty(rows, *self._hidden_shape, dtype=self._dtype)
        self._native.hidden_states(out)
        return out

    def forward(self, batch: Batch, cache: LayerCaches, head: bool) -> ForwardOutput:
        """Runs a forward, without the LM head if `head` is false, and writes the states of its rows to `cache`. Logits
        are float32. If a peer is lost, raises the exception of `TensorParallelGroup.lost`."""
        order = None
        if cache.kv.k.shape[1] > 1 and bool((batch.sequence.diff() < 0).any()):
            order = batch.sequence.argsort(stable=True)  # the rows of a sequence must be consecutive
            rows = ("tokens", "positions", "slots", "mask", "sequence")
            batch = replace(batch, **{name: getattr(batch, name)[order] for name in rows})
        logits = torch.empty(len(batch), self.num_logits) if head else None
        try:
            self._native.forward(
                batch.tokens,
                batch.positions,
                batch.slots,
                batch.sequence,
                batch.kv_len,
                batch.mask,
                cache=_cache_args(cache),
                logits=logits,
            )
        except OSError as error:
            lost = None if self._group is None else self._group.lost(error)
            raise lost or error from None
        output = ForwardOutput(logits, self.hidden_states(len(batch)))
        if order is None:
            return output
        place = order.argsort()
        return ForwardOutput(*(None if rows is None else rows[place] for rows in output))


LayerArgs = tuple[
    Tensor | None, _C.Weights, _C.Weights, Tensor | None, "MlpArgs", int, Tensor | None, Tensor | None, Tensor | None,
    float, float, Tensor | None, int, "DeltaArgs | None", "PerLayerPartArgs | None",
]  # fmt: skip


def _layer_args(layer: PackedLayer) -> LayerArgs:
    """Returns the arguments of a layer; see `_C.Decoder`."""
    return (
        _weight(layer.input_norm),
        layer.qkv.native,
        layer.o.native,
        _weight(layer.mlp_norm),
        mlp_args(layer.mlp),
        layer.attention,
        _weight(layer.qk_norm),
        _weight(layer.mixer_output_norm),
        _weight(layer.mlp_output_norm),
        layer.residual_multiplier,
        1.0 if layer.output_scale is None else float(layer.output_scale),
        layer.sinks,
        layer.cache_layer,
        None if layer.delta is None else _delta_args(layer.delta),
        None if layer.per_layer is None else _per_layer_part_args(layer.per_layer),
    )


OptionArgs = tuple[int | None, float | None, float | None, Tensor | None, bool]


def option_args(options: AttentionOptions, query_scale: Tensor | None) -> OptionArgs:
    """Returns the options of a kind of attention; see `_C.AttentionRows`."""
    return options.window, options.scale, options.softcap, query_scale, bool(options.norm_after_rope)


KindArgs = tuple[Tensor, Tensor, OptionArgs, int, int, Tensor | None, bool, int, int, int]


def _kind_args(kind: PackedAttention) -> KindArgs:
    """Returns the arguments of one kind of attention; see `_C.Decoder`."""
    options, whole = kind.options, kind.options.projection_norm
    q_size, k_size, counted = (0, 0, None) if whole is None else (whole.q_size, whole.k_size, whole.counted)
    return (
        kind.cos,
        kind.sin,
        option_args(options, options.query_scale),
        q_size,
        k_size,
        counted,
        kind.gate_size > 0,
        kind.num_heads,
        kind.kv_heads,
        kind.cache,
    )


SigmoidArgs = tuple[Tensor, int, int, float]
MlpArgs = tuple[
    _C.Weights, _C.Weights, str, _C.Weights | None, int, bool, _C.Weights | None, _C.Weights | None, SigmoidArgs | None
]


def mlp_args(mlp: PackedMlp | PackedMixture) -> MlpArgs:
    """Returns the arguments of an MLP; see `_C.Decoder`."""
    projections = mlp.gate_up.native, mlp.down.native, mlp.activation
    if not isinstance(mlp, PackedMixture):
        return *projections, None, 0, False, None, None, None
    experts = mlp.experts
    routing, sigmoid = (mlp.router.native, experts.experts_per_token, experts.norm_topk_prob), None
    if experts.sigmoid is not None and mlp.correction is not None:
        by = experts.sigmoid
        sigmoid = mlp.correction, by.groups, by.groups_per_token, by.multiplier
    if mlp.shared is None:
        return *projections, *routing, None, None, sigmoid
    return *projections, *routing, mlp.shared.gate_up.native, mlp.shared.down.native, sigmoid


DeltaArgs = tuple[_C.Weights, Tensor, Tensor, Tensor, Tensor]


def _delta_args(delta: PackedDelta) -> DeltaArgs:
    """Returns the arguments of a delta layer; see `_C.Decoder`."""
    return delta.rates.native, delta.conv, delta.decay_factor, delta.decay_bias, delta.norm.weight


def _delta_shape_args(shape: DeltaShape) -> tuple[int, int, int, int, int]:
    """Returns the sizes of the delta layers; see `_C.Decoder`."""
    return shape.k_heads, shape.v_heads, shape.k_head_dim, shape.v_head_dim, shape.conv_width


def _per_layer_args(weights: PackedPerLayer) -> tuple[Tensor, float, _C.Weights, Tensor, float]:
    """Returns what computes per-layer embeddings; see `_C.Decoder`."""
    return weights.table, weights.multiplier, weights.projection.native, weights.norm.weight, weights.norm.eps


PerLayerPartArgs = tuple[_C.Weights, _C.Weights, Tensor, str]


def _per_layer_part_args(part: PackedPerLayerPart) -> PerLayerPartArgs:
    """Returns what applies per-layer embeddings in a layer; see `_C.Decoder`."""
    return part.gate.native, part.projection.native, part.norm.weight, part.activation


def _cache_args(cache: LayerCaches) -> _C.ModelCache:
    """Returns the native view of a model's caches."""
    delta = None if cache.delta is None else native_delta_cache(cache.delta)
    return _C.ModelCache([_C.Cache(kind.k, kind.v) for kind in cache.kinds if kind is not cache.delta], delta)


def native_delta_cache(cache: DeltaTensors) -> _C.DeltaCache:
    """Returns the native view of a delta cache."""
    return _C.DeltaCache(
        state=cache.state,
        keys=cache.keys,
        updates=cache.updates,
        decays=cache.decays,
        inputs=cache.inputs,
        folded=cache.folded,
        conv_width=cache.conv_width,
    )


def _weight(norm: Any) -> Tensor | None:
    """Returns the weight of a packed norm, or None without a norm."""
    return None if norm is None else norm.weight
