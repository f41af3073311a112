"""Every family in GGUF: the logits equal those of transformers for the same values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cpu import cpu
from swiftspec.backends.reference import reference
from swiftspec.errors import UserError
from swiftspec.model.checkpoint import Checkpoint
from swiftspec.model.checkpoint_files import open_tensors, read_config
from swiftspec.model.config_json import parse_config
from swiftspec.model.formats import format_of
from swiftspec.model.formats.blocks import BLOCK_TYPES, BlockWeight
from swiftspec.model.formats.int8 import Int8Weight
from swiftspec.model.formats.mxfp4 import Mxfp4Weight
from swiftspec.model.gguf.config import gguf_config
from swiftspec.model.gguf.families import GGUF_ARCHITECTURES
from swiftspec.model.gguf.file import GgufFile
from swiftspec.model.loader import load_model
from swiftspec.model.spec import AttentionSpec
from swiftspec.model.weights import LayerWeights
from tests.model.architectures.test_families import CAPACITY, TOKENS, expected, logits, new_cache
from tests.support.gguf_files import architecture_of, write_gguf
from tests.support.thread_group import on_ranks
from tests.support.tiny_checkpoints import LONGROPE, ROPES, YARN, chain, make_model

PHI3_ROPE = {
    **LONGROPE, "short_factor": [1.0, 1.1, 1.3, 1.5, 1.7, 2.0], "long_factor": [2.0, 2.5, 3.5, 4.0, 6.5, 8.0],
    "attention_factor": 1.125,  # exact in float32, in which GGUF stores it
}  # fmt: skip
HYBRIDS = ("qwen35", "qwen35moe", "qwen3next")
EXPERTS = {"mlp_only_layers": [], "moe_intermediate_size": 64}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "attention_bias": True},
    "llama with YaRN": {"family": "llama", "rope": YARN},
    "qwen2": {"family": "qwen2", "rope": YARN},
    "qwen3": {"family": "qwen3", "rope": YARN},
    "qwen3moe": {"family": "qwen3_moe", **EXPERTS},
    "qwen2moe": {"family": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 96},
    "gpt-oss": {"family": "gpt_oss"},
    "qwen35": {"family": "qwen3_5_text"},
    "qwen35moe": {"family": "qwen3_5_moe_text", **EXPERTS, "shared_expert_intermediate_size": 96},
    "qwen3next": {"family": "qwen3_next", **EXPERTS, "shared_expert_intermediate_size": 96},
    "gemma3": {"family": "gemma3_text", "query_pre_attn_scalar": 16, "head_dim": 16},
    "smollm3": {"family": "smollm3"},
    "phi3": {"family": "phi3", "num_attention_heads": 2, "rope": PHI3_ROPE},
    "granite": {"family": "granite"},
    "olmo2": {"family": "olmo2"},
    "olmo3": {"family": "olmo3"},
    "glm4": {"family": "glm4", "head_dim": 16},
    "mistral3": {"family": "ministral3"},
    "mixtral": {"family": "mixtral"},
    "olmoe": {"family": "olmoe"},
    "seed_oss": {"family": "seed_oss"},
    "arcee": {"family": "arcee"},
    "ernie4_5": {"family": "ernie4_5", "use_bias": False},
    "gemma2": {"family": "gemma2", "query_pre_attn_scalar": 16, "head_dim": 16},
    "glm4moe": {"family": "glm4_moe", "moe_intermediate_size": 64},
    "hunyuan-dense": {"family": "hunyuan_v1_dense", "attention_bias": False, "rope": ROPES["default"]},
    "qwen2vl": {"family": "qwen2", "architecture": "qwen2vl"},
    "qwen3vl": {"family": "qwen3", "head_dim": 16, "architecture": "qwen3vl"},
}


def written(
    path: Path, kind: str | Callable[[str], str], metadata: Callable[[GGUFWriter], object] = lambda writer: None,
    architecture: str | None = None, **model: Any,
) -> Any:  # fmt: skip
    """Writes a GGUF file whose matrices have the type `kind`, and returns the model of transformers with its values."""
    built = make_model(dtype=torch.float64, **{"intermediate_size": 64, **model})
    values = write_gguf(path, built, (lambda name: kind) if isinstance(kind, str) else kind, metadata, architecture)
    missing, unexpected = built.load_state_dict(values, strict=False)
    assert not unexpected and {*missing} <= {"lm_head.weight"}
    return built


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["Q8_0", pytest.param("F32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / "model.gguf"
    built = written(path, kind, **CASES[name])
    theirs = parse_config(built.config.to_dict())
    assert read_config(path).spec == theirs.spec
    torch.testing.assert_close(logits(path, reference), expected(built, TOKENS), rtol=0, atol=1e-9)


def test_every_architecture_is_tested() -> None:
    found = {case.get("architecture") or architecture_of(make_model(**case)) for case in CASES.values()}
    assert found == {*GGUF_ARCHITECTURES}


FAMILIES_OF_PARTS = ["phi3", "glm4", "glm4moe", "qwen3moe", "qwen2moe", "gpt-oss", "qwen35", "qwen35moe", "qwen3next"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES_OF_PARTS)
def test_joined_matrices_on_two_ranks(tmp_path: Path, family: str) -> None:
    """Each rank has rows of each part of a joined matrix."""
    path = tmp_path / "model.gguf"
    want = expected(written(path, "Q8_0", **CASES[family]), TOKENS)
    for found in on_ranks(2, lambda group: logits(path, reference, group)):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-9)


@pytest.mark.sampled(3)
@pytest.mark.skipif(_C.level() == "none", reason="this CPU has no AVX2")
@pytest.mark.parametrize("family", ["gemma3", *FAMILIES_OF_PARTS])
def test_native_operators(tmp_path: Path, family: str) -> None:
    path, case = tmp_path / "model.gguf", {**CASES[family], "head_dim": 16}
    if family in HYBRIDS:
        case["linear_key_head_dim"] = 16
    want = expected(written(path, "Q4_0", **case), TOKENS)
    torch.testing.assert_close(forward_native(path), want, rtol=1e-4, atol=1e-4)


def weights_of(path: Path, layer: int) -> LayerWeights:
    config = read_config(path)
    return Checkpoint(config.spec, open_tensors(path), format_of(config), config.names).read().layers[layer]()


def forward_native(path: Path) -> Tensor:
    model = load_model(path, dtype=torch.float32, ops=cpu, max_positions=CAPACITY)
    found = model.forward(chain(TOKENS), new_cache(model, cpu)).logits
    assert found is not None
    return found.double()


def test_float4_experts(tmp_path: Path) -> None:
    """Experts in MXFP4 keep their codes, in the class of safetensors checkpoints, which the native operators pack."""
    path = tmp_path / "model.gguf"
    built = written(path, lambda name: "MXFP4" if "experts" in name else "Q8_0", **CASES["gpt-oss"], head_dim=16)
    want = expected(built, TOKENS)
    read = weights_of(path, 0)
    assert isinstance(read.gate_up, Mxfp4Weight) and isinstance(read.down, Mxfp4Weight)
    torch.testing.assert_close(logits(path, reference), want, rtol=0, atol=1e-9)
    for found in on_ranks(2, lambda group: logits(path, reference, group)):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-9)
    if _C.level() != "none":
        torch.testing.assert_close(forward_native(path), want, rtol=1e-4, atol=1e-4)


def test_a_dense_matrix_of_float4_blocks(tmp_path: Path) -> None:
    """Every matrix may have this type; those of a block with others are expanded."""
    path = tmp_path / "model.gguf"
    built = written(path, lambda name: "Q8_0" if "gate_up" in name else "MXFP4", **CASES["gpt-oss"])
    torch.testing.assert_close(logits(path, reference), expected(built, TOKENS), rtol=0, atol=1e-9)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "width"), [("Q8_0", 64), ("Q8_0", 16), ("Q4_K", 64)])
def test_the_order_of_value_heads(tmp_path: Path, kind: str, width: int) -> None:
    """Rows and whole blocks of columns change places in packed form. A block that heads divide becomes codes in int8,
    with the same values."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "linear_value_head_dim": width}
    path = tmp_path / "model.gguf"
    want = expected(written(path, kind, **CASES["qwen35"], **sizes), TOKENS)
    read = weights_of(path, 0)
    assert isinstance(read.qkv, BlockWeight) and read.qkv.kind.name == kind
    assert isinstance(read.o, BlockWeight if width % BLOCK_TYPES[kind].inputs == 0 else Int8Weight)
    torch.testing.assert_close(logits(path, reference), want, rtol=0, atol=1e-9)
    for found in on_ranks(2, lambda group: logits(path, reference, group)):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", [*HYBRIDS])
def test_layers_of_multi_token_prediction_are_not_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    extra = np.zeros(3, np.float32)

    def further(writer: GGUFWriter) -> None:
        writer.add_nextn_predict_layers(1)
        writer.add_block_count(5)
        for tensor in ("nextn.eh_proj", "attn_q"):
            writer.add_tensor(f"blk.4.{tensor}.weight", extra)

    want = expected(written(path, "F32", metadata=further, **CASES[name]), TOKENS)
    torch.testing.assert_close(logits(path, reference), want, rtol=0, atol=1e-9)


def test_what_the_metadata_of_hybrids_leave_out(tmp_path: Path) -> None:
    """Every fourth layer has attention, or as the interval has it; a mixture's shared expert has the dense size."""
    path, kinds = tmp_path / "model.gguf", "attention.recurrent_layers"
    written(path, "F32", **CASES["qwen35moe"])
    for interval, attention in ((None, [3]), (2, [1, 3])):
        spec = gguf_config(changed(path, {kinds: None, "full_attention_interval": interval})).spec
        assert [index for index, layer in enumerate(spec.layers) if isinstance(layer.mixer, AttentionSpec)] == attention
    without = {"expert_shared_feed_forward_length": None, "feed_forward_length": 128}
    experts = gguf_config(changed(path, without)).spec.layers[0].mlp.experts
    assert experts is not None and experts.shared_intermediate_size == 128


def changed(path: Path, changes: Mapping[str, object]) -> GgufFile:
    """The header of a file with other metadata, by the name after the architecture's; None removes an entry."""
    file = GgufFile.read(path)
    name = file.metadata["general.architecture"]
    entries = {**file.metadata, **{f"{name}.{key}": value for key, value in changes.items()}}
    return GgufFile(path, {key: value for key, value in entries.items() if value is not None}, file.tensors)


def mixers(file: GgufFile) -> list[AttentionSpec]:
    return [layer.attention for layer in gguf_config(file).spec.layers]


def test_what_the_metadata_of_gemma3_leave_out(tmp_path: Path) -> None:
    """llama.cpp's defaults hold, which are not those of config.json; the scale of 27B follows from its layers."""
    path, pattern = tmp_path / "model.gguf", "attention.sliding_window_pattern"
    written(path, "F32", **CASES["gemma3"])
    short = {pattern: None, "block_count": 12, "rope.freq_base": None, "rope.freq_base_swa": None}
    found = mixers(changed(path, {**short, "attention.head_count_kv": None}))
    assert [mixer.window for mixer in found] == 2 * [5, 5, 5, 5, 5, None]
    assert {mixer.rope.theta for mixer in found} == {10000.0} and {mixer.num_kv_heads for mixer in found} == {4}
    assert [mixer.window for mixer in mixers(changed(path, {pattern: 2}))] == [5, None, 5]
    assert [mixer.window for mixer in mixers(changed(path, {"attention.sliding_window": 0}))] == [None] * 3
    assert {mixer.scale for mixer in mixers(changed(path, {pattern: None, "block_count": 62}))} == {8**-0.5}
    assert {mixer.scale for mixer in found} == {16**-0.5}


def test_what_the_metadata_of_phi3_and_granite_leave_out(tmp_path: Path) -> None:
    path = tmp_path / "phi3.gguf"
    written(path, "F32", **CASES["phi3"])
    rope = mixers(changed(path, {"attention.sliding_window": 0, "rope.scaling.attn_factor": None}))[0].rope
    assert rope.attention_factor == pytest.approx((1 + math.log(512 / 64) / math.log(64)) ** 0.5)
    path = tmp_path / "granite.gguf"
    written(path, "F32", **CASES["granite"])
    spec = gguf_config(changed(path, {"attention.scale": 0.0, "residual_scale": None, "logit_scale": 8.0})).spec
    assert (spec.layers[0].attention.scale, spec.layers[0].residual_multiplier) == (8**-0.5, 1.0)
    assert spec.logit_multiplier == 1 / 8


def test_the_factors_of_yarn(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written(path, "F32", **CASES["qwen2"])
    usual = mixers(changed(path, {"rope.scaling.original_context_length": None}))[0].rope
    assert (usual.original_max_position, usual.attention_factor) == (512, pytest.approx(0.1 * math.log(4) + 1))
    for key in ("attn_factor", "yarn_attn_factor"):
        assert mixers(changed(path, {f"rope.scaling.{key}": 1.25}))[0].rope.attention_factor == 1.25
    assert mixers(changed(path, {"rope.scaling.type": None}))[0].rope.kind == "linear"  # llama.cpp's default


REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("qwen2", {"rope.scaling.yarn_ext_factor": 0.5}, "qwen2.rope.scaling.yarn_ext_factor 0.5 is not supported"),
    ("qwen2", {"rope.scaling.type": "longrope"}, "RoPE needs tensor rope_factors_short.weight"),
    ("qwen2", {"attention.causal": False}, "qwen2.attention.causal False is not supported"),
    ("qwen2", {"attention.temperature_scale": 0.1}, "qwen2.attention.temperature_scale 0.1 is not supported"),
    ("qwen3moe", {"expert_count": None}, "qwen3moe.expert_count None is not supported"),
    ("qwen3moe", {"expert_used_count": None}, "num_experts_per_tok is missing"),
    ("qwen3moe", {"expert_gating_func": 2}, "qwen3moe.expert_gating_func 2 is not supported"),
    ("qwen3moe", {"expert_weights_scale": 2.5}, "qwen3moe.expert_weights_scale 2.5 is not supported"),
    ("qwen2moe", {"expert_gating_func": 2}, "qwen2moe.expert_gating_func 2 is not supported"),
    ("qwen2moe", {"expert_feed_forward_length": None}, "intermediate_size is missing"),
    ("gpt-oss", {"expert_gating_func": 1}, "gpt-oss.expert_gating_func 1 is not supported"),
    ("gpt-oss", {"rope.freq_base_swa": 5.0}, "gpt-oss.rope.freq_base_swa 5.0 is not supported"),
    ("gpt-oss", {"expert_count": None}, "gpt-oss.expert_count None is not supported"),
    ("qwen2vl", {"rope.dimension_sections": np.array([1, 2, 0, 1])}, "qwen2vl.rope.dimension_sections array("),
    ("qwen3vl", {"rope.dimension_sections": np.array([2, 1, 1, 0])}, "qwen3vl.rope.dimension_sections array("),
    ("qwen3vl", {"rope.dimension_sections": 8}, "qwen3vl.rope.dimension_sections 8 is not supported"),
    ("glm4moe", {"expert_gating_func": 1}, "glm4moe.expert_gating_func 1 is not supported"),
    ("glm4moe", {"expert_group_count": 5}, "n_group 5 and topk_group 2 do not fit 12 experts"),
    ("glm4moe", {"nextn_predict_layers": 3}, "glm4moe.block_count 3 is not supported"),
    ("qwen35", {"rope.dimension_sections": np.array([1, 0, 1, 0])}, "qwen35.rope.dimension_sections array("),
    ("qwen35", {"rope.dimension_sections": 3}, "qwen35.rope.dimension_sections 3 is not supported"),
    ("qwen35", {"rope.dimension_sections": np.array([11.0, 11, np.nan])}, "qwen35.rope.dimension_sections array("),
    ("qwen35", {"attention.recurrent_layers": True}, "qwen35.attention.recurrent_layers True is not supported"),
    ("qwen35", {"full_attention_interval": 0}, "full_attention_interval must be"),
    ("qwen35", {"ssm.inner_size": 63}, "qwen35.ssm.inner_size 63 is not supported"),
    ("qwen35", {"ssm.time_step_rank": None}, "qwen35.ssm.inner_size 64 is not supported"),
    ("qwen35", {"ssm.group_count": 3}, "linear_num_value_heads 4 is not a multiple of linear_num_key_heads 3"),
    ("qwen35", {"nextn_predict_layers": 4}, "qwen35.block_count 4 is not supported"),
    ("qwen35", {"block_count": 2**40, "nextn_predict_layers": 2**40 - 4}, "qwen35.block_count 1099511627776"),
    ("qwen3next", {"block_count": 2e7, "nextn_predict_layers": 2e7 - 4}, "qwen3next.block_count 20000000.0"),
    ("gemma3", {"block_count": 2**40}, "num_hidden_layers must be a whole number in 1..16384"),
    ("qwen3moe", {"nextn_predict_layers": 2**40}, "qwen3moe.nextn_predict_layers 1099511627776"),
    ("qwen35", {"attention.recurrent_layers": np.ones(4, bool)}, "without a layer of type full_attention"),
    ("qwen35moe", {"expert_weights_scale": 2.5}, "qwen35moe.expert_weights_scale 2.5 is not supported"),
    ("qwen3next", {"attention.recurrent_layers": np.ones(2)}, "layer_types has 2 entries for 4 layers"),
    ("gemma3", {"attention.sliding_window_pattern": "x"}, "gemma3.attention.sliding_window_pattern 'x'"),
    ("gemma3", {"attention.sliding_window_pattern": np.ones(2)}, "layer_types has 2 entries for 3 layers"),
    ("phi3", {"rope.scaling.type": "yarn"}, "RoPE type 'yarn' with tensor rope_factors_short.weight"),
    ("phi3", {"rope.dimension_count": 4}, "RoPE needs tensor rope_factors_short.weight with half as many"),
    ("phi3", {"rope.scaling.type": np.array([1, 2])}, "phi3.rope.scaling.type array([1, 2]) is not supported"),
    ("gemma3", {"rope.scaling.type": True}, "gemma3.rope.scaling.type True is not supported"),
    ("glm4", {"attention.key_length": math.inf}, "damaged"),
    ("qwen2", {"attention.key_length": math.nan}, "RoPE of 8 of nan dimensions"),
    ("qwen35", {"ssm.time_step_rank": math.inf}, "qwen35.ssm.inner_size 64 is not supported"),
    ("qwen2", {"rope.freq_base": 1.0}, "RoPE type 'yarn' needs a rope_theta above 1"),
    ("gpt-oss", {"rope.freq_base": 1.0}, "RoPE type 'yarn' needs a rope_theta above 1"),
    ("granite", {"rope.scaling.finetuned": False}, "granite.rope.scaling.finetuned False is not supported"),
    ("glm4", {"nextn_predict_layers": 1}, "glm4.nextn_predict_layers 1 is not supported"),
    ("glm4", {"rope.dimension_sections": np.array([8, 12, 12, 0])}, "glm4.rope.dimension_sections array("),
    ("glm4", {"rope.dimension_count": 32}, "RoPE of 32 of 16 dimensions of a head is not supported"),
    ("mistral3", {"rope.scaling.type": "none"}, "mistral3.attention.temperature_scale without YaRN"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in {name for name, _, _ in REFUSED}:
        written(folder / name, "F32", **CASES[name])
    return folder


@pytest.mark.parametrize(("name", "changes", "words"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(
    models: Path, name: str, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(UserError) as caught:
        gguf_config(changed(models / name, changes))
    message = str(caught.value)
    assert message.startswith(f"{models / name}: ") and words in message and message.isprintable()
