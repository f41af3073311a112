"""Maps the tensors of a Hugging Face checkpoint, by name, to the weights of a model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from swiftspec.model.spec import AttentionSpec, ExpertsSpec, GatedDeltaSpec, MlpSpec, ModelSpec
from swiftspec.model.tensor_names import HF_NAMES, TensorNames
from swiftspec.model.weights import (
    DeltaWeights,
    DenseWeight,
    LayerWeights,
    ModelWeights,
    PerLayerWeights,
    Weight,
    fuse_weights,
    select,
)

SCALES = ("weight_scale", "weight_scale_inv")  # of a tensor "weight" with int8 or float8 codes
OPEN_GATE = 128.0  # a logit whose sigmoid is 1 in every dtype
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

    def skip(self, prefix: str, /) -> None:
        """Marks the tensors whose names begin with `prefix` as taken."""
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
        layers = [partial(self.layer, index) for index in range(len(spec.layers))]
        table = self.tensors.take(f"{names.embedding}.weight", vocab, hidden)
        own = partial(self.linear, names.head, vocab, hidden, bias=False)
        head = self._tied_head if spec.tie_word_embeddings else own
        return ModelWeights(table, layers, self.norm(names.norm, hidden), head, self._per_layer())

    def _per_layer(self) -> PerLayerWeights | None:
        """Reads what computes per-layer embeddings, or returns None if the model has none."""
        spec, names, size = self.spec, self.names, self.spec.per_layer_size
        if size == 0:
            return None
        rows = len(spec.layers) * size
        return PerLayerWeights(
            table=self.tensors.take(f"{names.per_layer_table}.weight", spec.vocab_size, rows),
            projection=self.linear(names.per_layer_model_projection, rows, spec.hidden_size, bias=False),
            norm=self.norm(names.per_layer_model_norm, size),
        )

    def _tied_head(self) -> Weight:
        """Returns the LM head of a model with tied embeddings: the embedding, unless the checkpoint has a different
        head, as fine-tuned models may. transformers uses that head, too."""
        vocab, hidden = self.spec.vocab_size, self.spec.hidden_size
        tied = self.linear(self.names.embedding, vocab, hidden, bias=False)
        if f"{self.names.head}.weight" not in self.tensors or not isinstance(tied, DenseWeight):
            return tied
        own = self.tensors.take(f"{self.names.head}.weight", vocab, hidden)
        return tied if own.dtype == tied.weight.dtype and torch.equal(own, tied.weight) else DenseWeight(own)

    def layer(self, index: int) -> LayerWeights:
        """Reads a layer."""
        names, hidden, layer = self.names, self.spec.hidden_size, self.spec.layers[index]
        prefix = names.layer(index)
        before, after = layer.norms != "after", layer.norms != "before"

        def norm(name: str, present: bool) -> Tensor | None:
            return self.norm(f"{prefix}.{name}", hidden) if present else None

        return LayerWeights(
            **self._mixer(prefix, layer.mixer),
            **self._mlp(prefix, layer.mlp),
            **self._per_layer_part(prefix),
            input_norm=norm(names.input_norm, before),
            mlp_norm=norm(names.mlp_norm, before),
            mixer_output_norm=norm(names.mixer_output_norm, after),
            mlp_output_norm=norm(names.mlp_output_norm, after),
            output_scale=self.tensors.take(f"{prefix}.{names.output_scale}", 1) if layer.output_scale else None,
        )

    def _per_layer_part(self, prefix: str) -> dict[str, Any]:
        """Reads the weights that apply per-layer embeddings in a layer, by their names in `LayerWeights`."""
        names, size, hidden = self.names, self.spec.per_layer_size, self.spec.hidden_size
        if size == 0:
            return {}
        return {
            "per_layer_gate": self.linear(f"{prefix}.{names.per_layer_gate}", size, hidden, bias=False),
            "per_layer_projection": self.linear(f"{prefix}.{names.per_layer_projection}", hidden, size, bias=False),
            "per_layer_norm": self.norm(f"{prefix}.{names.per_layer_norm}", hidden),
        }

    def _mixer(self, prefix: str, mixer: AttentionSpec | GatedDeltaSpec) -> dict[str, Any]:
        """Reads the weights of a mixer, by their names in `LayerWeights`."""
        if isinstance(mixer, GatedDeltaSpec):
            return self._delta(prefix, mixer)
        q_norm, k_norm = self._head_norms(prefix, mixer)
        return {
            "qkv": self._gated_qkv(prefix, mixer) if mixer.output_gate else self._qkv(prefix, mixer),
            "o": self.linear(f"{prefix}.{self.names.o}", self.spec.hidden_size, mixer.q_size, mixer.o_bias),
            "q_norm": q_norm,
            "k_norm": k_norm,
            "v_norm": torch.ones(1, mixer.head_dim) if mixer.v_norm and not mixer.shares_kv else None,
            "sinks": self.tensors.take(f"{prefix}.{self.names.sinks}", mixer.num_heads) if mixer.sinks else None,
        }

    def _delta(self, prefix: str, mixer: GatedDeltaSpec) -> dict[str, Any]:
        names, take, heads = self.names, self.tensors.take, mixer.num_v_heads
        qkv, rates = self._delta_projections(prefix, mixer)
        if not isinstance(rates, DenseWeight):  # a small matrix, which shards divide into single rows
            rates = DenseWeight(rates.dequantize(torch.float32))
        delta = DeltaWeights(
            rates=rates,
            conv=take(f"{prefix}.{names.conv}", mixer.conv_size, 1, mixer.conv_width).squeeze(1),
            decay_log=self._decay_log(prefix, heads),
            decay_bias=take(f"{prefix}.{names.decay_bias}", heads),
            norm=take(f"{prefix}.{names.delta_norm}", mixer.v_head_dim),
        )
        o = self.linear(f"{prefix}.{names.delta_o}", self.spec.hidden_size, mixer.v_size, bias=False)
        if names.tiled_value_heads:
            qkv, o, delta = _in_order_of_key_heads(mixer, qkv, o, delta)
        return {"qkv": qkv, "o": o, "delta": delta}

    def _decay_log(self, prefix: str, heads: int) -> Tensor:
        """Reads A_log of a delta layer."""
        if not self.names.decay:
            return self.tensors.take(f"{prefix}.{self.names.decay_log}", heads)
        # in float64, because exp(log x) is not x in float32
        return self.tensors.take(f"{prefix}.{self.names.decay}", heads).double().neg().log()

    def _delta_projections(self, prefix: str, mixer: GatedDeltaSpec) -> tuple[Weight, Weight]:
        """Reads the projection of a delta layer to queries, keys, values and gate, and that to the rates."""
        names, hidden, heads = self.names, self.spec.hidden_size, mixer.num_v_heads

        def fused(*parts: tuple[str, int]) -> Weight:
            return fuse_weights([self.linear(f"{prefix}.{name}", rows, hidden, bias=False) for name, rows in parts])

        shared = heads // mixer.num_k_heads  # value heads of a key head
        keys, values = mixer.k_head_dim, shared * mixer.v_head_dim
        if names.delta_qkv_gate:
            joined = fused((names.delta_qkv_gate, mixer.conv_size + mixer.v_size))
            qkv = _reordered(joined, _parts_of_key_heads(mixer.num_k_heads, keys, keys, values, values))
        else:
            qkv = fused((names.delta_qkv, mixer.conv_size), (names.delta_gate, mixer.v_size))
        if not names.rates:
            return qkv, fused((names.update_rate, heads), (names.decay_rate, heads))
        rates = fused((names.rates, 2 * heads))
        return qkv, _reordered(rates, _parts_of_key_heads(mixer.num_k_heads, shared, shared))

    def _gated_qkv(self, prefix: str, mixer: AttentionSpec) -> Weight:
        """Reads the projection of queries, keys, values and output gate. The checkpoint has the gate of each head after
        its queries."""
        names, hidden, width = self.names, self.spec.hidden_size, mixer.head_dim
        both = self.linear(f"{prefix}.{names.q}", 2 * mixer.q_size, hidden, mixer.qkv_bias)
        q_rows = (torch.arange(mixer.num_heads).unsqueeze(1) * 2 * width + torch.arange(width)).flatten()
        k, v = (self.linear(f"{prefix}.{name}", mixer.kv_size, hidden, mixer.qkv_bias) for name in (names.k, names.v))
        qkv = fuse_weights([both.outputs(q_rows), k, v])
        return fuse_weights([_in_rope_order(qkv, mixer), both.outputs(q_rows + width)])

    def _qkv(self, prefix: str, mixer: AttentionSpec) -> Weight:
        """Reads the projection of queries, keys and values, with the rows of each head in the order of
        `_rope_order`."""
        names, hidden = self.names, self.spec.hidden_size
        heads = [(names.q, mixer.q_size), (names.k, mixer.kv_size), (names.v, mixer.kv_size)]
        if names.qkv:
            heads = [(names.qkv, mixer.q_size + 2 * mixer.kv_size)]
        elif mixer.shares_kv:
            for name in (names.k, names.v, names.k_norm):  # which some checkpoints contain without a use
                self.tensors.skip(f"{prefix}.{name}.")
            heads = heads[:1]
        elif mixer.keys_as_values:
            heads = heads[:2]
        head = self.spec.draft_head
        inputs = 2 * hidden if head is not None and head.kind == "eagle3" else hidden
        parts = [self.linear(f"{prefix}.{name}", rows, inputs, mixer.qkv_bias) for name, rows in heads]
        if mixer.keys_as_values and not mixer.shares_kv:
            parts.append(parts[1])
        return _in_rope_order(fuse_weights(parts), mixer)

    def _head_norms(self, prefix: str, mixer: AttentionSpec) -> tuple[Tensor | None, Tensor | None]:
        """Reads the weights of the norms of queries and keys, [heads, head_dim] or [1, head_dim] each."""
        if mixer.qk_norm == "none":
            return None, None
        whole, order = mixer.qk_norm == "projection", _rope_order(mixer)
        counts = (mixer.num_heads, mixer.num_kv_heads) if whole else (1, 1)
        named = [*zip((self.names.q_norm, self.names.k_norm), counts, strict=True)]
        norms = [
            self.norm(f"{prefix}.{name}", heads * mixer.head_dim).view(heads, mixer.head_dim)
            for name, heads in (named[:1] if mixer.shares_kv else named)
        ]
        if order is not None:
            norms = [norm[:, order] for norm in norms]
        return norms[0], None if mixer.shares_kv else norms[1]

    def _mlp(self, prefix: str, mlp: MlpSpec) -> dict[str, Any]:
        """Reads the weights of an MLP, by their names in `LayerWeights`."""
        names, inner, hidden = self.names, mlp.intermediate_size, self.spec.hidden_size
        if mlp.experts is not None:
            return self._mixture(prefix, mlp, mlp.experts)
        if names.gate_up:
            gate_up = self.linear(f"{prefix}.{names.gate_up}", 2 * inner, hidden, mlp.bias)
        else:
            halves = [self.linear(f"{prefix}.{name}", inner, hidden, mlp.bias) for name in (names.gate, names.up)]
            gate_up = fuse_weights(halves)
        return {"gate_up": gate_up, "down": self.linear(f"{prefix}.{names.down}", hidden, inner, mlp.bias)}

    def _mixture(self, prefix: str, mlp: MlpSpec, experts: ExpertsSpec) -> dict[str, Any]:
        names, hidden, shared = self.names, self.spec.hidden_size, experts.shared_intermediate_size
        router = self.linear(f"{prefix}.{names.router}", experts.num_experts, hidden, mlp.bias)
        joined = bool(names.gate_experts)
        gate_up, down = self._joined(prefix, mlp) if joined else self._experts(f"{prefix}.{names.experts}", mlp)
        read: dict[str, Any] = {"router": router, "gate_up": gate_up, "down": down}
        if experts.sigmoid is not None:
            read["correction"] = self.tensors.take(f"{prefix}.{names.correction}", experts.num_experts)
        if not shared:
            return read
        halves = [
            self.linear(f"{prefix}.{name}", shared, hidden, bias=False)
            for name in (names.shared_gate_proj, names.shared_up_proj)
        ]
        if experts.shared_gate:
            router = fuse_weights([router, self.linear(f"{prefix}.{names.shared_gate}", 1, hidden, bias=False)])
        else:
            router = _with_open_gate(router)
        return read | {
            "router": router,
            "shared_gate_up": fuse_weights(halves),
            "shared_down": self.linear(f"{prefix}.{names.shared_down_proj}", hidden, shared, bias=False),
        }

    def _joined(self, prefix: str, mlp: MlpSpec) -> tuple[Weight, Weight]:
        """Reads the projections of all experts from the modules that have them one below the other. Returns gate and up
        of each expert one below the other, too."""
        names, count, inner, hidden = self.names, mlp.num_experts, mlp.intermediate_size, self.spec.hidden_size
        rows = count * inner
        modules = (f"{prefix}.{name}" for name in (names.gate_experts, names.up_experts))
        halves = [self.linear(module, rows, hidden, mlp.bias) for module in modules]
        order = torch.arange(2 * rows).view(2, count, inner).transpose(0, 1).flatten()
        down = self.linear(f"{prefix}.{names.down_experts}", count * hidden, inner, mlp.bias)
        return fuse_weights(halves).outputs(order), down

    def _experts(self, prefix: str, mlp: MlpSpec) -> tuple[Weight, Weight]:
        """Reads the projections of all experts: those of each expert, or the two tensors [num_experts, outputs, inputs]
        that transformers 5 has in memory."""
        count, inner, hidden = mlp.num_experts, mlp.intermediate_size, self.spec.hidden_size
        if self.names.alternating_experts and f"{prefix}.0.gate_proj.bias" not in self.tensors:
            order = torch.arange(2 * count * inner).view(count, inner, 2).mT.flatten()
            gate_up = self._joined_experts(f"{prefix}.gate_up_proj", count, 2 * inner, hidden, mlp.bias)
            return gate_up.outputs(order), self._joined_experts(f"{prefix}.down_proj", count, hidden, inner, mlp.bias)
        if f"{prefix}.gate_up_proj" in self.tensors:
            gate_up = self.tensors.take(f"{prefix}.gate_up_proj", count, 2 * inner, hidden)
            down = self.tensors.take(f"{prefix}.down_proj", count, hidden, inner)
            return DenseWeight(gate_up.flatten(0, 1)), DenseWeight(down.flatten(0, 1))
        modules = [f"{prefix}.{expert}" for expert in range(count)]
        halves = [
            self.linear(f"{module}.{name}", inner, hidden, mlp.bias)
            for module in modules
            for name in (self.names.expert_gate, self.names.expert_up)
        ]
        downs = [self.linear(f"{module}.{self.names.expert_down}", hidden, inner, mlp.bias) for module in modules]
        return fuse_weights(halves), fuse_weights(downs)

    def _joined_experts(self, name: str, count: int, rows: int, columns: int, bias: bool) -> Weight:
        """Reads a projection [rows, columns] of all experts from the tensor `name` [num_experts, columns, rows], or in
        the format of a quantised checkpoint. The tensor of the biases is "NAME_bias"."""
        shift = self.tensors.take(f"{name}_bias", count, rows).flatten() if bias else None
        if self.layout is not None and name not in self.tensors:
            return self.layout.linear(self.tensors, name, count * rows, columns, shift)
        return DenseWeight(self.tensors.take(name, count, columns, rows).mT.flatten(0, 1), shift)

    def norm(self, module: str, size: int) -> Tensor:
        """Reads the weights of an RMSNorm. 1 + weight is computed in float32, or in float64 for float64 weights."""
        weight = self.tensors.take(f"{module}.weight", size)
        if not self.spec.norm_unit_offset:
            return weight
        return 1 + (weight if weight.dtype == torch.float64 else weight.float())

    def linear(self, module: str, rows: int, columns: int, bias: bool) -> Weight:
        """Reads the matrix [rows, columns] of `module`. A quantised checkpoint may have dense matrices, too: those
        whose tensor is named "weight" and has no scale."""
        shift = self.tensors.take(f"{module}.bias", rows) if bias else None
        scaled = any(f"{module}.{scale}" in self.tensors for scale in SCALES)
        if self.layout is None or (f"{module}.weight" in self.tensors and not scaled):
            return DenseWeight(self.tensors.take(f"{module}.weight", rows, columns), shift)
        return self.layout.linear(self.tensors, module, rows, columns, shift)


def _with_open_gate(router: Weight) -> Weight:
    """Returns a router with one more output, the gate of a shared expert, which is 1 for all tokens."""
    matrix = router.weight if isinstance(router, DenseWeight) else router.dequantize(torch.float32)
    rows, hidden = matrix.shape
    bias = matrix.new_zeros(rows + 1)
    if router.bias is not None:
        bias[:rows] = router.bias
    bias[rows] = OPEN_GATE
    return DenseWeight(torch.cat((matrix, matrix.new_zeros(1, hidden))), bias)


def _in_rope_order(qkv: Weight, mixer: AttentionSpec) -> Weight:
    """Returns the projection of queries, keys and values with the rows of each head in the order of `_rope_order`."""
    order = _rope_order(mixer)
    if order is None:
        return qkv
    rotated = mixer.num_heads + (0 if mixer.shares_kv else mixer.num_kv_heads)
    first = torch.arange(rotated).unsqueeze(1) * mixer.head_dim
    values = torch.arange(rotated * mixer.head_dim, mixer.qkv_size)
    return _reordered(qkv, torch.cat(((first + order).flatten(), values)))


def _in_order_of_key_heads(
    mixer: GatedDeltaSpec, qkv: Weight, o: Weight, delta: DeltaWeights
) -> tuple[Weight, Weight, DeltaWeights]:
    """Returns the weights of a delta layer whose value heads are ordered by their key head. In the arguments the first
    value head of each key head comes first, then the second one of each."""
    heads, width = mixer.num_v_heads, mixer.v_head_dim
    order = torch.arange(heads).view(-1, mixer.num_k_heads).T.flatten()
    values = (order.unsqueeze(1) * width + torch.arange(width)).flatten()
    conv = torch.cat((torch.arange(2 * mixer.k_size), 2 * mixer.k_size + values))
    ordered = replace(
        delta,
        rates=delta.rates.outputs(torch.cat((order, heads + order))),
        conv=select(delta.conv, 0, conv),
        decay_log=select(delta.decay_log, 0, order),
        decay_bias=select(delta.decay_bias, 0, order),
    )
    return _reordered(qkv, torch.cat((conv, mixer.conv_size + values))), o.inputs(values, width), ordered


def _parts_of_key_heads(heads: int, *rows: int) -> Tensor:
    """Returns the order of outputs that collects the parts of a projection: the first `rows` of each key head, then the
    next, and so on. In the checkpoint the rows of a key head are adjacent."""
    parts = torch.arange(heads * sum(rows)).view(heads, -1).split(rows, 1)
    return torch.cat([part.flatten() for part in parts])


def _reordered(weight: Weight, order: Tensor) -> Weight:
    """Returns a weight with the outputs `order`."""
    if not isinstance(weight, DenseWeight) and not _keeps_eights(order):
        # int4 formats pack eight rows, which are not neighbours in the new order
        weight = DenseWeight(weight.dequantize(torch.float32), weight.bias)
    return weight.outputs(order)


def _keeps_eights(order: Tensor) -> bool:
    """Returns whether an order consists of runs of eight consecutive numbers that start at a multiple of eight."""
    if len(order) % 8:
        return False
    runs = order.view(-1, 8)
    return bool((runs[:, :1] % 8 == 0).all() and (runs == runs[:, :1] + torch.arange(8)).all())


def _rope_order(mixer: AttentionSpec) -> Tensor | None:
    """Returns for each element of a query or key head its index in the checkpoint, [head_dim], so that the elements of
    a rotated pair become half a head apart; None if they already are. Scores do not depend on the order."""
    dim, rope = mixer.head_dim, mixer.rope
    count = rope.rotated(dim)
    if rope.kind == "none" or (count == dim and not rope.interleaved):
        return None
    rotated, rest = torch.arange(count), torch.arange(count, dim)
    first, second = (rotated[::2], rotated[1::2]) if rope.interleaved else rotated.chunk(2)
    return torch.cat((first, rest[: len(rest) // 2], second, rest[len(rest) // 2 :]))
