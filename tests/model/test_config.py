"""config.json as transformers 4 and 5 write it, and errors that name the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swiftspec.errors import UserError
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.config import ModelConfig
from swiftspec.model.config_json import parse_config
from swiftspec.model.formats import format_of
from swiftspec.model.formats.awq import Awq
from swiftspec.model.formats.compressed_tensors import CompressedTensors
from swiftspec.model.formats.float8_codes import Float8
from swiftspec.model.formats.gptq import Gptq
from swiftspec.model.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from tests.support.tiny_checkpoints import FAMILIES, ROPES, make_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
MLX = {"group_size": 64, "bits": 4}
AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "version": "gemm",
    "zero_point": True,
    "modules_to_not_convert": ["lm_head"],
}
PACKED_WEIGHTS: dict[str, Any] = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "actorder": None,
    "dynamic": False,
}


def packed(weights: dict[str, Any] | None = None, **group: Any) -> dict[str, Any]:
    """A compressed-tensors config with some fields changed."""
    only = {"targets": ["Linear"], "weights": PACKED_WEIGHTS | (weights or {}), "input_activations": None} | group
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": only},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def read(**changes: Any) -> ModelConfig:
    """Parses LLAMA with changed fields; a field whose change is `...` is removed."""
    return parse_config({k: v for k, v in (LLAMA | changes).items() if v is not ...})


def mixer(**changes: Any) -> AttentionSpec:
    return read(**changes).spec.layer.attention


def test_a_version_4_config() -> None:
    config = read()
    layer = LayerSpec(AttentionSpec(4, 2, 16, RopeSpec(500000.0)), MlpSpec(96))
    assert config.spec == ModelSpec(128, 64, (layer, layer), norm_eps=1e-5, tie_word_embeddings=False)
    assert config.eos_token_ids == (2, 3) and config.max_position_embeddings == 256
    assert config.dtype == "bfloat16" and not config.quantization


def test_defaults_and_either_spelling() -> None:
    assert mixer(num_key_value_heads=...).num_kv_heads == 4
    assert mixer(head_dim=None).head_dim == 16 and mixer(head_dim=32).head_dim == 32
    assert read(eos_token_id=7).eos_token_ids == (7,) and read(eos_token_id=None).eos_token_ids == ()
    assert read(torch_dtype=..., dtype="float16").dtype == "float16"
    assert read(torch_dtype=...).dtype == "float32"
    assert read(architectures=...).spec == read().spec


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({"rope_scaling": None}, RopeSpec(500000.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeSpec(500000.0, "linear", 2.0)),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, RopeSpec(500000.0, "llama3", 8.0, 1.0, 4.0, 64)),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, RopeSpec(5.0)),
        (
            {"rope_theta": ..., "rope_parameters": {"rope_type": "linear", "rope_theta": 5.0, "factor": 4}},
            RopeSpec(5.0, "linear", 4.0),
        ),
    ],
)
def test_rope(fields: dict[str, Any], want: RopeSpec) -> None:
    assert mixer(**fields).rope == want


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rope", ROPES)
def test_configs_written_by_transformers(tmp_path: Path, family: str, rope: str) -> None:
    make_model(family=family, rope=ROPES[rope]).config.save_pretrained(tmp_path)
    mixer = read_config(tmp_path).spec.layer.attention
    assert (mixer.rope.kind, mixer.rope.theta) == (rope, ROPES[rope]["rope_theta"])
    assert mixer.rope.factor == ROPES[rope].get("factor", 1.0) and mixer.head_dim == 8


def test_quantisation() -> None:
    assert format_of(read()) is None
    assert format_of(read(quantization_config=AWQ)) == Awq(128)
    assert format_of(read(quantization_config=packed())) == CompressedTensors("pack-quantized", 4, 32, zero_point=False)
    asymmetric = read(quantization_config=packed({"symmetric": False}))
    assert format_of(asymmetric) == CompressedTensors("pack-quantized", 4, 32, zero_point=True)
    int8 = read(quantization_config=packed({"num_bits": 8, "strategy": "channel"}))
    assert format_of(int8) == CompressedTensors("pack-quantized", 8, None, zero_point=False)
    assert format_of(read(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": -1})) == Gptq(-1, 1)
    block = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    assert format_of(read(quantization_config=block)) == Float8((128, 128))


FLOAT = {"format": "float-quantized"}
SLIDING = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "MambaForCausalLM"),
        ({"architectures": ..., "model_type": "gpt2"}, "gpt2"),
        ({"architectures": ..., "model_type": ...}, "architecture None"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings is missing"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_scaling": {"type": "longrope"}}, "original_max_position_embeddings is missing"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"use_sliding_window": True}, "sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": ...}, "num_hidden_layers is missing"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"vocab_size": True}, "vocab_size"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"quantization": MLX}, "MLX"),
        ({"quantization": MLX, "quantization_config": MLX}, "MLX"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "GPTQ with 3 bits"),
        ({"quantization_config": {"quant_method": "gptq", "checkpoint_format": "marlin"}}, "GPTQ format 'marlin'"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "fp8 of format 'e5m2'"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "weight_block_size"),
        ({"quantization_config": AWQ | {"version": "gemv"}}, "gemv"),
        ({"quantization_config": AWQ | {"version": "GEMV_fast"}}, "gemv_fast"),
        ({"quantization_config": AWQ | {"bits": 8}}, "8 bits"),
        ({"quantization_config": AWQ | {"group_size": -1}}, "group size -1"),
        ({"quantization_config": AWQ | {"zero_point": False}}, "zero points"),
        ({"quantization_config": packed({"num_bits": 3})}, "3 bits"),
        ({"quantization_config": packed({"num_bits": 8, "symmetric": False})}, "zero points of int8"),
        ({"quantization_config": packed({"num_bits": 6, "type": "float", "strategy": "channel"}) | FLOAT}, "6 bits"),
        ({"quantization_config": packed({"actorder": "sideways"})}, "activation order 'sideways'"),
        ({"quantization_config": packed({"strategy": "channel"})}, "strategy 'channel'"),
        ({"quantization_config": packed({"type": "float"})}, "weight type 'float'"),
        ({"quantization_config": packed(input_activations={"num_bits": 8})}, "quantised activations"),
        ({"quantization_config": packed() | {"kv_cache_scheme": {"num_bits": 8}}}, "KV cache"),
        ({"quantization_config": packed() | {"format": "marlin-24"}}, "marlin-24"),
        ({"quantization_config": packed() | {"config_groups": {}}}, "config group"),
        ({"quantization_config": packed() | {"sparsity_config": {"format": "sparse-24"}}}, "sparse-24"),
        ({"quantization_config": "awq"}, "quantization_config"),
    ],
)
def test_invalid_values_are_refused_by_name(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(UserError) as caught:
        format_of(read(**changes))
    assert names in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"architectures": 5}, "architectures must be a list of strings, not 5"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of strings, not 'LlamaForCausalLM'"),
        ({"architectures": [5]}, "architectures must be a list of strings, not [5]"),
        ({"architectures": ["x" * 5000]}, "architecture 'xxx"),
        ({"model_type": 5}, "model_type must be a string"),
        ({"layer_types": 5}, "layer_types must be a list of strings, not 5"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings must be a whole number in 2..2147483647"),
        ({"max_position_embeddings": 1}, "max_position_embeddings must be a whole number in 2..2147483647, not 1"),
        ({"hidden_size": 10**12}, "hidden_size must be a whole number in 1..262144"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": 10**10}, "vocab_size"),
        ({"head_dim": 10**400}, "head_dim"),
        ({"intermediate_size": 2.5}, "intermediate_size"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_theta": 1e-300}, "rope_theta"),
        ({"rope_scaling": {"rope_type": 5}}, "rope_type must be a string"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e300}}, "rope_scaling.factor must be a number"),
        ({"partial_rotary_factor": "all"}, "partial_rotary_factor must be a number"),
        ({"attention_bias": "no"}, "attention_bias must be true or false, not 'no'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"hidden_act": ["silu"]}, "hidden_act must be a string"),
        ({"torch_dtype": ["float32"]}, "torch_dtype must be a string"),
        ({"eos_token_id": [10**30]}, "eos_token_id"),
        ({"quantization_config": {"quant_method": ["awq"]}}, "quant_method must be a string"),
        ({"quantization_config": AWQ | {"bits": "4"}}, "quantization_config.bits must be a whole number"),
        ({"quantization_config": AWQ | {"group_size": [128]}}, "quantization_config.group_size must be a whole number"),
        ({"quantization_config": AWQ | {"zero_point": "yes"}}, "zero_point must be true or false"),
        ({"quantization_config": packed({"group_size": None})}, "weights.group_size is missing"),
        ({"quantization_config": packed() | {"config_groups": {"g": 5}}}, "config_groups.g must be an object"),
        ({"quantization_config": packed() | {"sparsity_config": 5}}, "sparsity_config must be an object"),
    ],
)
def test_hostile_values_are_refused_by_name(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(UserError) as caught:
        format_of(read(**changes))
    assert names in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_whole_number_may_be_written_as_a_float() -> None:
    assert len(read(num_hidden_layers=2.0).spec.layers) == 2
    assert format_of(read(quantization_config=AWQ | {"bits": 4.0, "group_size": 128.0})) == Awq(128)
    assert read(eos_token_id=[2, -1]).eos_token_ids == (2,)  # a negative number means none


def test_directories(tmp_path: Path) -> None:
    def message(path: Path) -> str:
        with pytest.raises(UserError) as caught:
            read_config(path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no such directory" in message(tmp_path / "none")
    assert "no config.json" in message(tmp_path)
    (tmp_path / "model.gguf").touch()
    assert "name the file instead of its directory" in message(tmp_path)
    assert "an empty file, not a GGUF file" in message(tmp_path / "model.gguf")
    (tmp_path / "adapter_config.json").touch()
    assert "a LoRA adapter; merge it into its base model" in message(tmp_path)
    file = tmp_path / "config.json"
    sizes = json.dumps({**LLAMA, "hidden_size": 0})
    quantised = json.dumps({**LLAMA, "quantization_config": {"quant_method": "hqq"}})
    for text, names in (("{", "JSON"), ("[]", "JSON object"), (sizes, "hidden_size"), (quantised, "hqq")):
        file.write_text(text)
        assert names in message(tmp_path) and "config.json" in message(tmp_path)
    file.write_bytes(b"\xff\xfe")
    assert "UTF-8" in message(tmp_path)


def test_generation_config_names_the_stop_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path).eos_token_ids == (2, 3)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert read_config(tmp_path).eos_token_ids == (2, 3, 5, 6)
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_config(tmp_path).eos_token_ids == (2, 3)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id must be"):
        read_config(tmp_path)


def test_a_name_that_is_not_a_valid_folder_name() -> None:
    with pytest.raises(UserError, match="no such directory"):
        read_config("x" * 5000)
