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
        return found.mixer.qkv_bias, found.mixer.o_bias, found.mlp.bias, found.mixer.qk_norm

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


def test_an_unknown_architecture_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(UserError) as caught:
        architecture_of(Fields({"architectures": ["MistralForCausalLM"]}))
    known = "LlamaForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM are"
    assert str(caught.value) == f"architecture 'MistralForCausalLM' is not supported; {known}"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sliding_windows_are_refused(name: str) -> None:
    for fields in ({"use_sliding_window": True}, {"layer_types": ["full_attention", "sliding_attention"]}):
        with pytest.raises(UserError, match="sliding window attention is not supported"):
            layer(name, **fields)
    assert layer(name, use_sliding_window=False, sliding_window=4096, layer_types=["full_attention"] * 2)
