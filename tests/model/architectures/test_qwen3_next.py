"""Qwen3-Next: the projections of a delta layer, whose rows the checkpoint orders by key head, and which layers are
mixtures. tests/model/architectures/test_qwen3_5.py compares its text in every mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.pair import parameters
from swiftspec.backends.cpu import cpu
from swiftspec.backends.reference import reference
from swiftspec.backends.unfused import unfused
from swiftspec.errors import UserError
from swiftspec.file_io import Fields
from swiftspec.model.architectures import ARCHITECTURES, architecture_of
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.config_json import parse_config
from swiftspec.model.loader import load_model
from swiftspec.model.spec import AttentionSpec, ExpertsSpec, GatedDeltaSpec, ModelSpec
from tests.model.architectures.test_families import TOKENS, expected, logits
from tests.model.test_loader import change_config, quantise
from tests.support.thread_group import on_ranks
from tests.support.tiny_checkpoints import make_checkpoint

FAMILY, NAME = "qwen3_next", "Qwen3NextForCausalLM"
F64, BF16 = torch.float64, torch.bfloat16


def spec(**fields: Any) -> ModelSpec:
    data = Fields({"architectures": [NAME]} | fields)
    return architecture_of(data).spec(data)


def test_the_released_model() -> None:
    """Qwen3-Next-80B-A3B, whose sizes are the defaults."""
    model = spec()
    kinds = [isinstance(layer.mixer, AttentionSpec) for layer in model.layers]
    assert kinds == [index % 4 == 3 for index in range(48)] and model.norm_unit_offset
    assert model.layers[0].mixer == GatedDeltaSpec(16, 32, 128, 128, 4)
    assert {layer.mlp.experts for layer in model.layers} == {ExpertsSpec(512, 10, True, 512)}
    attention = model.layers[3].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (16, 2, 256)
    assert attention.rope.share == 0.25 and attention.output_gate and attention.qk_norm == "head"
    assert parameters(parse_config({"architectures": [NAME]})) == pytest.approx(79.7e9, rel=0.005)


def test_which_layers_are_mixtures() -> None:
    def mixtures(**fields: Any) -> list[int]:
        layers = spec(num_hidden_layers=6, intermediate_size=99, **fields).layers
        dense = {layer.mlp.intermediate_size for layer in layers if layer.mlp.experts is None}
        assert dense <= {99}
        return [index for index, layer in enumerate(layers) if layer.mlp.experts is not None]

    assert mixtures() == [0, 1, 2, 3, 4, 5]
    assert mixtures(mlp_only_layers=[0, 3]) == [1, 2, 4, 5]
    assert mixtures(decoder_sparse_step=2) == [1, 3, 5]
    assert mixtures(decoder_sparse_step=3, mlp_only_layers=[5]) == [2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["linear_attention", "mamba"]}, "layer type 'mamba' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"num_experts_per_tok": 513}, "num_experts_per_tok 513 exceeds num_experts 512"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads 24 is not a multiple of linear_num_key_heads 16"),
        ({"linear_conv_kernel_dim": 33}, "linear_conv_kernel_dim"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        spec(**fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "shape",
    [
        {"linear_num_key_heads": 1, "linear_num_value_heads": 3},
        {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_value_head_dim": 8},
        {"linear_num_key_heads": 4, "linear_num_value_heads": 12, "linear_key_head_dim": 4},
        {"decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False},
    ],
    ids=str,
)
def test_logits_equal_those_of_transformers(tmp_path: Path, shape: dict[str, Any]) -> None:
    want = expected(make_checkpoint(tmp_path, family=FAMILY, dtype=F64, **shape), TOKENS)
    for ops in (reference, unfused):
        torch.testing.assert_close(logits(tmp_path, ops), want, rtol=0, atol=1e-9)


def test_the_order_of_rows_is_that_of_qwen3_5(tmp_path: Path) -> None:
    """Queries, keys, values, gate; rates of update, rates of decay."""
    shape = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 2,
             "linear_value_head_dim": 3, "vocab": 16, "dtype": F64}  # fmt: skip
    make_checkpoint(tmp_path, family=FAMILY, **shape)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    prefix = "model.layers.0.linear_attn"
    for name in ("in_proj_qkvz", "in_proj_ba"):
        weight = tensors[f"{prefix}.{name}.weight"]
        weight[:] = torch.arange(len(weight)).unsqueeze(1)
    save_file(tensors, file)
    layer = load_model(tmp_path, dtype=F64, ops=reference, max_positions=8).stack.layers[0]
    one = torch.zeros(1, 32, dtype=F64)
    one[0, 0] = 1
    # by key head: 2 rows of queries, 2 of keys, 6 of values and 6 of the gate
    heads = [[0, 1, 16, 17], [2, 3, 18, 19], [*range(4, 10), *range(20, 26)], [*range(10, 16), *range(26, 32)]]
    assert layer.qkv(one)[0].tolist() == [row for part in heads for row in part]
    assert layer.delta is not None
    assert layer.delta.rates(one)[0].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["awq", "pack-quantized"])
@pytest.mark.parametrize("key_dim", [8, 4], ids=["whole words", "parts of words"])
def test_int4_projections(tmp_path: Path, layout: str, key_dim: int) -> None:
    """Rows that change places keep their codes, or the matrix is expanded, as that of the rates always is."""
    path = tmp_path / "model"
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64, "moe_intermediate_size": 32,
             "shared_expert_intermediate_size": 64, "linear_key_head_dim": key_dim}  # fmt: skip
    make_checkpoint(path, family=FAMILY, dtype=F64, **sizes)
    twin = quantise(path, layout, skip=("mlp.gate.", "shared_expert_gate"))
    packed = load_file(path / "model.safetensors")
    assert not any(f"model.layers.0.linear_attn.{name}.weight" in packed for name in ("in_proj_qkvz", "in_proj_ba"))
    want = logits(twin, reference)
    torch.testing.assert_close(logits(path, reference), want, rtol=0, atol=1e-9)
    if key_dim % 8 == 0:
        one, two = on_ranks(2, lambda group: logits(path, reference, group))
        assert torch.equal(one, two)
        torch.testing.assert_close(one, want, rtol=0, atol=1e-9)


def test_tensors_that_do_not_fit_take_one_line(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family=FAMILY, dtype=F64)
    change_config(tmp_path, linear_num_value_heads=8)
    with pytest.raises(
        UserError, match=r"in_proj_ba\.weight has shape \[8, 32\]|in_proj_qkvz\.weight has shape"
    ) as caught:
        logits(tmp_path, reference)
    assert "\n" not in str(caught.value)


def test_it_runs_on_operators_with_delta_layers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family=FAMILY, head_dim=16)
    with pytest.raises(UserError, match=r"the CPU operators need delta heads of a multiple of 16, not 8 and 16"):
        cpu.check_spec(read_config(tmp_path).spec, BF16)
    assert ARCHITECTURES[NAME].names.text_prefixes == ("model.", "lm_head.")
