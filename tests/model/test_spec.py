"""The spec decides what is read from a checkpoint and how large it is, layer by layer."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swiftspec.builder.memory_estimate import MemoryEstimate, kv_bytes_per_token
from swiftspec.capabilities import MODEL_FEATURES
from swiftspec.errors import UserError
from swiftspec.model.checkpoint import Checkpoint
from swiftspec.model.config import ModelConfig
from swiftspec.model.shard import Shard
from swiftspec.model.spec import (
    READER_FIELDS,
    AttentionSpec,
    ExpertsSpec,
    GatedDeltaSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    RopeSpec,
    traits,
    unknown_fields,
)
from swiftspec.model.tensor_names import HF_NAMES, TensorNames

ATTENTION = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeSpec(10000.0))
PLAIN = LayerSpec(ATTENTION, MlpSpec(48))
FULL = LayerSpec(replace(ATTENTION, qkv_bias=True, o_bias=True, qk_norm="head"), MlpSpec(48, bias=True))


def spec_of(*layers: LayerSpec, tie: bool = False) -> ModelSpec:
    return ModelSpec(64, 32, layers, norm_eps=1e-6, tie_word_embeddings=tie)


def config_of(spec: ModelSpec) -> ModelConfig:
    return ModelConfig(spec, HF_NAMES, 128, "float32", {}, ())


class Recorder:
    """A checkpoint that contains every tensor but `missing`, and records the shapes of those that are read."""

    folder = Path("recorder")

    def __init__(self, missing: str = "") -> None:
        self.missing = missing
        self.shapes: dict[str, tuple[int, ...]] = {}

    def __contains__(self, name: str) -> bool:
        return name != self.missing

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def take(self, name: str, *shape: int, kinds: Any = None) -> Tensor:
        self.shapes[name] = shape
        return torch.zeros(shape)

    def skip(self, prefix: str) -> None:
        raise NotImplementedError("no layer shares keys and values")


def read(spec: ModelSpec, names: TensorNames = HF_NAMES, missing: str = "") -> dict[str, tuple[int, ...]]:
    """The tensors that are read, and their shapes."""
    tensors = Recorder(missing)
    weights = Checkpoint(spec, tensors, names=names).read()
    for layer in weights.layers:
        layer()
    weights.head()
    return tensors.shapes


def layer_of(shapes: dict[str, tuple[int, ...]], index: int) -> dict[str, tuple[int, ...]]:
    prefix = f"model.layers.{index}."
    return {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}


MATRICES = {
    "input_layernorm.weight": (32,), "self_attn.q_proj.weight": (32, 32), "self_attn.k_proj.weight": (16, 32),
    "self_attn.v_proj.weight": (16, 32), "self_attn.o_proj.weight": (32, 32),
    "post_attention_layernorm.weight": (32,), "mlp.gate_proj.weight": (48, 32), "mlp.up_proj.weight": (48, 32),
    "mlp.down_proj.weight": (32, 48),
}  # fmt: skip
BIASES = {
    "self_attn.q_proj.bias": (32,), "self_attn.k_proj.bias": (16,), "self_attn.v_proj.bias": (16,),
    "self_attn.o_proj.bias": (32,), "mlp.gate_proj.bias": (48,), "mlp.up_proj.bias": (48,), "mlp.down_proj.bias": (32,),
}  # fmt: skip
HEAD_NORMS = {"self_attn.q_norm.weight": (8,), "self_attn.k_norm.weight": (8,)}


def test_every_field_decides_what_is_read() -> None:
    """Each layer is read by its own spec."""
    wide = replace(PLAIN, mlp=MlpSpec(80))
    shapes = read(spec_of(PLAIN, FULL, wide))
    assert layer_of(shapes, 0) == MATRICES
    assert layer_of(shapes, 1) == MATRICES | BIASES | HEAD_NORMS
    assert layer_of(shapes, 2)["mlp.down_proj.weight"] == (32, 80)
    ends = {"model.embed_tokens.weight": (64, 32), "model.norm.weight": (32,)}
    assert {name: shape for name, shape in shapes.items() if ".layers." not in name} == {
        **ends, "lm_head.weight": (64, 32)
    }  # fmt: skip
    assert "lm_head.weight" not in read(spec_of(PLAIN, tie=True), missing="lm_head.weight")


def test_an_architecture_can_rename_tensors() -> None:
    names = TensorNames(layers="language_model.layers", q="attention.wq", k_norm="attention.key_norm")
    shapes = read(spec_of(FULL), names)
    assert shapes["language_model.layers.0.attention.wq.weight"] == (32, 32)
    assert shapes["language_model.layers.0.attention.key_norm.weight"] == (8,)
    assert not any(name.startswith("model.layers.") for name in shapes)


def test_memory_is_the_sum_over_the_layers() -> None:
    wide = replace(PLAIN, mixer=replace(ATTENTION, num_kv_heads=4), mlp=MlpSpec(80))
    assert kv_bytes_per_token(spec_of(PLAIN, wide), torch.bfloat16) == 2 * 2 * (2 + 4) * 8
    tables = 2 * 64 * 32
    matrices = 32 * (32 + 16 + 16 + 32 + 3 * 48) + 32 * (4 * 32 + 3 * 80)
    need = MemoryEstimate(config_of(spec_of(PLAIN, wide)), torch.float32, 8, 1)
    norms = 32 * (2 * 4 + 1)  # at most four in a layer
    assert need.weights == 4 * (tables + matrices + norms)


def test_layers_that_differ_are_refused_where_all_must_be_alike() -> None:
    spec = spec_of(PLAIN, replace(PLAIN, mlp=MlpSpec(80)))
    with pytest.raises(UserError, match="layers differ"):
        _ = spec.layer
    assert spec_of(PLAIN, PLAIN).layer == PLAIN


def test_each_layer_is_sharded_by_its_own_shape() -> None:
    wide = replace(PLAIN, mixer=replace(ATTENTION, num_kv_heads=4, head_dim=16), mlp=MlpSpec(80))
    first, second = Shard.of(config_of(spec_of(PLAIN, wide)), 0, 2).layers
    assert (first.num_heads, first.kv_heads, first.head_dim, len(first.down)) == (2, 1, 8, 32)
    assert (second.num_heads, second.kv_heads, second.head_dim, len(second.down)) == (2, 2, 16, 48)


def test_norms_fused_and_renamed_matrices() -> None:
    names = TensorNames(qkv="attention.qkv", gate_up="mlp.both", mixer_output_norm="a", mlp_output_norm="b")
    after = replace(FULL, norms="after", mixer=replace(FULL.attention, qk_norm="projection"), output_scale=True)
    shapes = layer_of(read(spec_of(after), names), 0)
    assert shapes == {
        "attention.qkv.weight": (64, 32), "attention.qkv.bias": (64,), "self_attn.o_proj.weight": (32, 32),
        "self_attn.o_proj.bias": (32,), "self_attn.q_norm.weight": (32,), "self_attn.k_norm.weight": (16,),
        "a.weight": (32,), "b.weight": (32,), "mlp.both.weight": (96, 32), "mlp.both.bias": (96,),
        "mlp.down_proj.weight": (32, 48), "mlp.down_proj.bias": (32,), "layer_scalar": (1,),
    }  # fmt: skip
    both = layer_of(read(spec_of(replace(PLAIN, norms="both")), names), 0)
    assert both.keys() == MATRICES.keys() - {f"self_attn.{name}_proj.weight" for name in "qkv"} - {
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
    } | {"attention.qkv.weight", "mlp.both.weight", "a.weight", "b.weight"}
    shared = replace(PLAIN, mixer=replace(ATTENTION, keys_as_values=True))
    assert layer_of(read(spec_of(shared)), 0).keys() == MATRICES.keys() - {"self_attn.v_proj.weight"}


def test_optional_fields_in_use_are_named_unless_they_are_known() -> None:
    """A field that nobody declares as known is refused, too."""
    assert unknown_fields(spec_of(PLAIN)) is None
    biased = replace(PLAIN, mixer=replace(ATTENTION, qkv_bias=True, o_bias=True, keys_as_values=True))
    assert unknown_fields(spec_of(biased)) is None, "the reader of the checkpoint handles them"
    windowed = replace(PLAIN, mixer=replace(ATTENTION, window=8), norms="both")
    spec = replace(spec_of(PLAIN, windowed), logit_softcap=30.0)
    assert unknown_fields(spec) == (
        "soft cap of logits (logit_softcap), no norms after attention and MLP (norms), no sliding window (window)"
    )
    assert unknown_fields(spec, ("window", "norms")) == "soft cap of logits (logit_softcap)"
    assert unknown_fields(spec, ("window", "norms", "logit_softcap")) is None
    experts = ExpertsSpec(4, 2, norm_topk_prob=True, shared_intermediate_size=8)
    mixture = spec_of(PLAIN, replace(PLAIN, mlp=replace(PLAIN.mlp, experts=experts)))
    assert unknown_fields(mixture, ("experts",)) == "shared expert (shared_intermediate_size)"
    optional = {
        field.name
        for part in (spec, *spec.layers, ATTENTION, PLAIN.mlp, experts)
        for field in fields(part)
        if field.default is not MISSING
    }
    described = {name.partition("=")[0] for name in MODEL_FEATURES}
    assert optional | {"gated_delta"} == described | READER_FIELDS, "every optional field has a description"
    with_relu = spec_of(replace(PLAIN, norms="after", mlp=replace(PLAIN.mlp, activation="relu")))
    assert [*traits(with_relu)] == ["norms=after", "activation=relu"]
    delta = replace(PLAIN, mixer=GatedDeltaSpec(2, 4, 8, 8, 4))
    gated = replace(PLAIN, mixer=replace(ATTENTION, output_gate=True))
    assert unknown_fields(spec_of(gated, delta)) == (
        "gated delta layers (gated_delta), no gate of the attention output (output_gate)"
    )
    with pytest.raises(UserError, match="only attention layers are"):
        _ = delta.attention
