"""gpt-oss: what config.json determines, and what is read from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from swiftspec.backends.cpu import cpu
from swiftspec.backends.reference import reference
from swiftspec.backends.reference.linear import apply_gate
from swiftspec.errors import UserError
from swiftspec.file_io import Fields
from swiftspec.lab.quantize import quantize
from swiftspec.model.architectures import architecture_of
from swiftspec.model.checkpoint import Checkpoint
from swiftspec.model.checkpoint_files import open_tensors, read_config
from swiftspec.model.config_json import parse_config
from swiftspec.model.formats import format_of
from swiftspec.model.spec import ExpertsSpec, MlpSpec, ModelSpec, RopeSpec
from swiftspec.model.weights import LayerWeights
from tests.model.architectures.test_families import TOKENS, expected, logits
from tests.model.architectures.test_native_families import logits as native_logits
from tests.support.thread_group import on_ranks
from tests.support.tiny_checkpoints import make_checkpoint

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
# that of gpt-oss-120b, without what the model does not depend on
PUBLISHED: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "eos_token_id": 200002, "experts_per_token": 4,
    "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 18,
    "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 36,
    "num_key_value_heads": 8, "num_local_experts": 128, "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "vocab_size": 201088,
}  # fmt: skip


def spec(**fields: Any) -> ModelSpec:
    data = Fields(PUBLISHED | fields)
    return architecture_of(data).spec(data)


def test_the_published_config() -> None:
    config = parse_config(PUBLISHED)
    first, second, *rest = config.spec.layers
    assert rest == [first, second] * 17 and config.dtype == "bfloat16" and config.max_position_embeddings == 131072
    assert first.mlp == second.mlp == MlpSpec(2880, True, "clamped_swiglu", ExpertsSpec(128, 4, True))
    mixer = first.attention
    assert (mixer.window, second.attention.window) == (128, None)
    assert mixer.sinks and mixer.qkv_bias and mixer.o_bias and mixer.qk_norm == "none"
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == (64, 8, 64)
    factor = 0.1 * torch.tensor(32.0, dtype=F64).log().item() + 1
    want = RopeSpec(150000, "yarn", 32.0, original_max_position=4096, truncate=False, attention_factor=factor)
    assert mixer.rope == want
    assert spec(rope_scaling=None, layer_types=None) == config.spec, "the defaults of transformers"
    assert parse_config(PUBLISHED | {"dtype": "float32"}).dtype == "float32"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts_per_tok": 129}, "num_experts_per_tok 129 exceeds num_local_experts 128"),
        ({"num_local_experts": 0}, "num_local_experts"),
        ({"swiglu_limit": 5.0}, "swiglu_limit 5.0 is not supported; only 7.0 is"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha 1.0 is not supported; only 1.702 is"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 36 layers"),
        ({"sliding_window": None}, "sliding_window"),
    ],
)
def test_invalid_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        spec(**fields)


def test_the_clamped_gate() -> None:
    gate, up = torch.tensor([[-20.0, -1.0, 0.0, 3.0, 7.5], [1.0, -8.0, 9.0, 0.5, -0.5]], dtype=F64)
    limited, shifted = (
        torch.tensor([-20.0, -1.0, 0.0, 3.0, 7.0]).double(),
        torch.tensor([2.0, -6, 8, 1.5, 0.5]).double(),
    )
    want = shifted * limited / (1 + (-1.702 * limited).exp())
    torch.testing.assert_close(apply_gate(torch.cat((gate, up)), "clamped_swiglu"), want, rtol=1e-12, atol=0)
    assert apply_gate(torch.tensor([torch.nan, 1.0, 1.0, torch.nan]), "clamped_swiglu").isnan().all()


def without(tensors: dict[str, Tensor], ending: str) -> dict[str, Tensor]:
    return {name: torch.zeros_like(x) if name.endswith(ending) else x for name, x in tensors.items()}


@pytest.mark.parametrize("ending", ["sinks", "gate_up_proj_bias", "down_proj_bias", "router.bias", "o_proj.bias"])
def test_every_tensor_matters(tmp_path: Path, ending: str) -> None:
    """A test that compares logits would otherwise not notice that one is ignored."""
    make_checkpoint(tmp_path, family="gpt_oss", dtype=F64)
    before = logits(tmp_path, reference)
    file = tmp_path / "model.safetensors"
    save_file(without(load_file(file), ending), file)
    assert (logits(tmp_path, reference) - before).abs().max() > 1e-3


def test_some_gates_reach_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, family="gpt_oss", dtype=F64)
    before = logits(tmp_path, reference)
    monkeypatch.setattr("swiftspec.backends.reference.linear.SWIGLU_LIMIT", 1e9)
    assert (logits(tmp_path, reference) - before).abs().max() > 1e-3


def test_experts_in_tensors_of_their_own(tmp_path: Path) -> None:
    """As int4 checkpoints have them."""
    theirs = make_checkpoint(tmp_path, family="gpt_oss", dtype=F64)
    file = tmp_path / "model.safetensors"
    tensors = dict[str, Tensor]()
    for name, tensor in load_file(file).items():
        prefix, found, kind = name.partition("mlp.experts.")
        ending = "bias" if kind.endswith("_bias") else "weight"
        for expert, part in enumerate(tensor if found else ()):
            halves = {"gate_proj": part[..., ::2], "up_proj": part[..., 1::2]}
            for module, each in (halves if kind.startswith("gate_up") else {"down_proj": part}).items():
                tensors[f"{prefix}{found}{expert}.{module}.{ending}"] = (
                    each.T if each.ndim == 2 else each
                ).contiguous()
        if not found:
            tensors[name] = tensor
    save_file(tensors, file)
    torch.testing.assert_close(logits(tmp_path, reference), expected(theirs, TOKENS), rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_quantised_experts(tmp_path: Path, dtype: torch.dtype) -> None:
    """`swiftspec quantize` writes the experts in tensors of their own, which the native operators read as int4."""
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64, "vocab": 65}
    make_checkpoint(tmp_path / "model", family="gpt_oss", dtype=F32, **sizes)
    matrices, before, after = quantize(tmp_path / "model", tmp_path / "int4", 32)
    assert matrices == 3 * (4 + 6 * 3) and after < before / 3
    tensors = load_file(tmp_path / "int4" / "model.safetensors")
    assert "model.layers.0.mlp.experts.5.down_proj.bias" in tensors and "model.layers.0.mlp.router.weight" in tensors
    dense, int4 = (first_layer(tmp_path / name) for name in ("model", "int4"))
    for one, other in ((dense.gate_up, int4.gate_up), (dense.down, int4.down), (dense.o, int4.o)):
        error = (other.dequantize(F32) - one.dequantize(F32)).norm() / one.dequantize(F32).norm()
        assert 0.01 < error < 0.1 and one.bias is not None and other.bias is not None
        torch.testing.assert_close(other.bias.float(), one.bias, rtol=1e-3, atol=1e-4)
    one, two = on_ranks(2, lambda group: logits(tmp_path / "int4", reference, group))
    assert torch.equal(one, two)
    torch.testing.assert_close(one, logits(tmp_path / "int4", reference), rtol=0, atol=1e-9)
    if cpu.level() == "none":
        return
    exact = native_logits(tmp_path / "int4", reference, F64, [70])
    ours = native_logits(tmp_path / "int4", cpu, dtype, [70])
    assert float((ours - exact).norm()) < (1e-5 if dtype == F32 else 0.3) * float(exact.norm())
    assert torch.equal(native_logits(tmp_path / "int4", cpu, dtype, [30, *range(31, 50), 70]), ours)


def first_layer(path: Path) -> LayerWeights:
    config = read_config(path)
    return Checkpoint(config.spec, open_tensors(path), format_of(config), config.names).read().layers[0]()
