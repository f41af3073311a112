"""The registry of families. The forward of each is compared with transformers in tests/model/test_transformer.py."""

from __future__ import annotations

from typing import Any

import pytest

from swiftspec.errors import UserError
from swiftspec.file_io import Fields
from swiftspec.model.architectures import ARCHITECTURES, architecture_of
from swiftspec.model.spec import LayerSpec

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48,
}  # fmt: skip


def layer(name: str, **fields: Any) -> LayerSpec:
    data = Fields(SIZES | {"architectures": [name]} | fields)
    return architecture_of(data).spec(data).layer


def test_what_each_family_determines() -> None:
    """Biases of QKV, of O and of the MLP, and the norm of query and key heads."""

    def traits(name: str, **fields: Any) -> tuple[bool, ...]:
        found = layer(name, **fields)
        return found.attention.qkv_bias, found.attention.o_bias, found.mlp.bias, found.attention.qk_norm == "head"

    biases = {"attention_bias": True, "mlp_bias": True}
    assert traits("LlamaForCausalLM") == (False, False, False, False)
    assert traits("LlamaForCausalLM", **biases) == (True, True, True, False)
    assert traits("Qwen2ForCausalLM") == traits("Qwen2ForCausalLM", **biases) == (True, False, False, False)
    assert traits("Qwen3ForCausalLM") == (False, False, False, True)
    assert traits("Qwen3ForCausalLM", **biases) == (True, True, False, True)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_model_type_replaces_missing_architectures(name: str) -> None:
    kind = ARCHITECTURES[name].model_type
    assert architecture_of(Fields({"model_type": kind})) is ARCHITECTURES[name]
    assert architecture_of(Fields({"model_type": "gpt2", "architectures": [name]})) is ARCHITECTURES[name]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("MambaForCausalLM", "docs/guides/families.md lists those that are"),
        ("Gemma4MoeForCausalLM", "of its relatives Gemma2, Gemma3, Gemma4, Gemma4Unified are"),
        ("SmolLMForCausalLM", "of its relatives SmolLM3 are"),
        ("4", "docs/guides/families.md lists those that are"),
    ],
)
def test_an_unknown_architecture_is_refused_with_its_relatives(name: str, known: str) -> None:
    with pytest.raises(UserError) as caught:
        architecture_of(Fields({"architectures": [name]}))
    assert str(caught.value) == f"architecture {name!r} is not supported; {known}"


@pytest.mark.parametrize(
    "name",
    ["LlamaForCausalLM", "GraniteForCausalLM", "Olmo2ForCausalLM", "Glm4ForCausalLM", "HunYuanDenseV1ForCausalLM"],
)
def test_sliding_windows_are_refused_by_families_without_them(name: str) -> None:
    for fields in ({"use_sliding_window": True}, {"layer_types": ["full_attention", "sliding_attention"]}):
        with pytest.raises(UserError, match="sliding window attention is not supported in this architecture"):
            layer(name, **fields)
    assert layer(name, use_sliding_window=False, sliding_window=4096, layer_types=["full_attention"] * 2)


def test_alpha_scales_the_base_of_rope() -> None:
    """Of Hunyuan, in the forms of both versions of transformers."""
    found = [
        layer("HunYuanDenseV1ForCausalLM", head_dim=128, **fields).attention
        for fields in (
            {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0}},
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0}},
            {"rope_theta": 1e4 * 1000 ** (128 / 126)},
        )
    ]
    assert found[0] == found[1] == found[2] and found[0].norm_after_rope and round(found[0].rope.theta) == 11158840
    with pytest.raises(UserError, match="RoPE type 'dynamic' is not supported"):
        layer("HunYuanDenseV1ForCausalLM", rope_scaling={"type": "dynamic", "factor": 2.0})


def windows(name: str, count: int = 8, **fields: Any) -> list[int | None]:
    data = Fields(SIZES | {"architectures": [name], "num_hidden_layers": count} | fields)
    return [each.attention.window for each in architecture_of(data).spec(data).layers]


def test_which_layers_have_a_sliding_window() -> None:
    assert windows("MistralForCausalLM") == [4096] * 8, "the default of transformers"
    assert windows("MistralForCausalLM", sliding_window=None) == [None] * 8
    assert windows("Qwen3ForCausalLM", sliding_window=64) == [None] * 8, "use_sliding_window is false"
    qwen = {"use_sliding_window": True, "sliding_window": 64}
    assert windows("Qwen2ForCausalLM", max_window_layers=6, **qwen) == [None] * 6 + [64] * 2
    assert windows("Olmo3ForCausalLM", sliding_window=9) == [9, 9, 9, None] * 2
    assert windows("Gemma3ForCausalLM", sliding_window=9) == [9] * 5 + [None] + [9] * 2
    assert windows("Gemma3ForCausalLM", 4, sliding_window=9, sliding_window_pattern=2) == [9, None] * 2
    assert windows("GptOssForCausalLM", 4) == [128, None] * 2
    plain = {"hidden_size_per_layer_input": 0, "sliding_window": 9}
    assert windows("Gemma4ForCausalLM", **plain) == [9] * 5 + [None, 9, None], "the last layer has full attention"
    assert windows("SmolLM3ForCausalLM", 4, **qwen) == [None, None, None, 64], "the layers without RoPE"
    assert windows("Phi3ForCausalLM", 2, sliding_window=9) == [9, 9]


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, "sliding_window"),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "layer_types": ["linear_attention"] * 2}, "linear_attention"),
        ("Olmo3ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "bidirectional attention"),
        ("Gemma3ForCausalLM", {"hidden_activation": "silu"}, "hidden_act 'silu'"),
        ("Gemma4ForCausalLM", {"enable_moe_block": True}, "with experts"),
        (
            "Gemma4UnifiedForCausalLM",
            {"per_layer_config": {"full_attention": {"num_attention_heads": 2}}},
            "per_layer_config with 'num_attention_heads'",
        ),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.4}, "partial_rotary_factor 0.4 of head_dim 8 is not"),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}},
            "short_factor has 1 numbers instead of 4",
        ),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "longrope", "short_factor": ["x"]}}, "short_factor"),
    ],
)
def test_what_a_family_does_not_support_is_refused_by_name(name: str, fields: dict[str, Any], message: str) -> None:
    data = Fields(SIZES | {"architectures": [name]} | fields)
    with pytest.raises(UserError) as caught:
        architecture_of(data).spec(data)
    assert message in str(caught.value) and "\n" not in str(caught.value)
