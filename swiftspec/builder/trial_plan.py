"""Plan of a GPU trial: the shapes of the operators that a process will run, from the configurations of its models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swiftspec.backends.cuda.linear import tile_group_size
from swiftspec.backends.cuda.trial_checks import (
    AttentionShape,
    LayerShape,
    Projection,
    ProjectionShape,
    TreeShape,
    TrialPlan,
)
from swiftspec.model.config import ModelConfig
from swiftspec.model.formats import format_of
from swiftspec.model.formats.int8 import group_of
from swiftspec.model.shard import EIGHT, Shard
from swiftspec.model.spec import LayerSpec


@dataclass(frozen=True, slots=True)
class TrialModel:
    """A model that runs on the CUDA operators. `ranks`: size of its group. `capacity`: slots of its KV cache.
    `int4_head`: a dense LM head is quantised at load."""

    config: ModelConfig
    ranks: int
    capacity: int
    cache_dtype: torch.dtype
    int4_head: bool


def make_trial_plan(models: Sequence[TrialModel], tree: TreeShape | None, particles: int) -> TrialPlan:
    """Returns the plan for models of one process. All ranks of a group have the same shapes."""
    layers, heads = list[LayerShape](), list[ProjectionShape]()
    for model in models:
        spec = model.config.spec
        shard = Shard.of(model.config, 0, model.ranks) if model.ranks > 1 else None
        for index, layer in enumerate(spec.layers):
            if layer not in spec.layers[:index]:
                layers += [_layer_shape(model, layer, shard, index, group) for group in _stored_groups(model.config)]
        rows = spec.vocab_size if shard is None else shard.head_rows
        group = group_of(spec.hidden_size) if model.int4_head and rows % EIGHT == 0 else None
        heads.append(ProjectionShape("head", rows, spec.hidden_size, group or 0))
    return TrialPlan(tuple(dict.fromkeys(layers)), tuple(dict.fromkeys(heads)), tree, particles)


def _stored_groups(config: ModelConfig) -> list[int]:
    """Returns the inputs per scale of the int4 matrices of a checkpoint; 0 for matrices that the operators have in
    bfloat16, as they have those whose inputs are permuted."""
    layout = format_of(config)
    if layout is None or not layout.is_int4:
        return [0]
    groups: Any = (config.quantization.get("config_groups") or {}).values()
    orders = [group.get("weights", {}).get("actorder") for group in groups if isinstance(group, dict)]
    permuted = bool(config.quantization.get("desc_act")) or any(orders)
    return [layout.group_size, 0] if permuted else [layout.group_size]


def _layer_shape(model: TrialModel, layer: LayerSpec, shard: Shard | None, index: int, stored: int) -> LayerShape:
    mixer, hidden = layer.attention, model.config.spec.hidden_size
    heads, kv_heads, inner = mixer.num_heads, mixer.num_kv_heads, layer.mlp.intermediate_size
    if shard is not None:
        part = shard.layers[index]
        heads, kv_heads, inner = part.num_heads, part.kv_heads, len(part.down)

    def projection(op: Projection, outputs: int, inputs: int) -> ProjectionShape:
        # a shard of O consists of whole heads, and the kernels have groups of a few sizes
        group = math.gcd(stored, mixer.head_dim) if op == "o" and shard is not None else stored
        group = tile_group_size(group) if stored else 0
        fits = group and inputs % group == 0 and outputs % EIGHT == 0
        return ProjectionShape(op, outputs, inputs, group if fits else 0)

    return LayerShape(
        projection("qkv", (heads + 2 * kv_heads) * mixer.head_dim, hidden),
        projection("o", hidden, heads * mixer.head_dim),
        projection("gate_up", 2 * inner, hidden),
        projection("down", hidden, inner),
        AttentionShape(
            heads,
            kv_heads,
            mixer.head_dim,
            model.capacity,
            str(model.cache_dtype).removeprefix("torch."),
            mixer.qk_norm == "head",
        ),
    )
