"""Qwen3.5-MoE: its fields. test_mixtures.py reads the forms that its experts have in checkpoints, and
tests/model/architectures/test_qwen3_5.py compares its text in every mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.pair import parameters
from swiftspec.backends.reference import reference
from swiftspec.errors import UserError
from swiftspec.file_io import Fields
from swiftspec.model.architectures import architecture_of, text_model_fields
from swiftspec.model.config_json import parse_config
from swiftspec.model.spec import AttentionSpec, ExpertsSpec, GatedDeltaSpec, ModelSpec
from tests.model.architectures.test_families import logits
from tests.support.tiny_checkpoints import make_checkpoint

FAMILY, F64 = "qwen3_5_moe_text", torch.float64
MULTIMODAL = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}


def spec(**fields: Any) -> ModelSpec:
    data = Fields(MULTIMODAL | {"text_config": {"model_type": FAMILY} | fields, "vision_config": {}})
    return architecture_of(data).spec(text_model_fields(data))


def test_the_released_model() -> None:
    """The text model of Qwen3.5-35B-A3B, whose sizes are the defaults."""
    model = spec()
    kinds = [isinstance(layer.mixer, AttentionSpec) for layer in model.layers]
    assert kinds == [index % 4 == 3 for index in range(40)] and model.norm_unit_offset
    assert model.layers[0].mixer == GatedDeltaSpec(16, 32, 128, 128, 4)
    assert {layer.mlp.experts for layer in model.layers} == {ExpertsSpec(256, 8, True, 512)}
    assert {layer.mlp.intermediate_size for layer in model.layers} == {512}
    assert parameters(parse_config(MULTIMODAL | {"text_config": {}})) == pytest.approx(34.7e9, rel=0.01)
    assert spec(norm_topk_prob=False) == model, "the weights of the experts always sum to 1"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"mlp_only_layers": [2]},
            r"layers without experts \(mlp_only_layers, decoder_sparse_step\) are not supported",
        ),
        ({"decoder_sparse_step": 2}, r"layers without experts \(mlp_only_layers, decoder_sparse_step\)"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok 257 exceeds num_experts 256"),
        ({"model_type": "qwen4_moe_text"}, "text model 'qwen4_moe_text' of Qwen3_5MoeForConditionalGeneration is not"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        spec(**fields)
    assert "\n" not in str(caught.value)
    assert spec(mlp_only_layers=[], decoder_sparse_step=1) == spec()


def test_experts_of_another_orientation_take_one_line(tmp_path: Path) -> None:
    theirs = make_checkpoint(tmp_path, family=FAMILY, dtype=F64)
    theirs.save_pretrained(tmp_path, save_original_format=False)
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.experts.down_proj"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name].transpose(1, 2).contiguous()}, file)
    with pytest.raises(
        UserError, match=r"down_proj has shape \[6, 16, 32\], config\.json implies \[6, 32, 16\]"
    ) as caught:
        logits(tmp_path, reference)
    assert "\n" not in str(caught.value)
