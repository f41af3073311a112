"""`swiftspec quantize`: AutoAWQ's layout, round-to-nearest, what stays dense, and one line for what cannot be done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from swiftspec.__main__ import main
from swiftspec.backends.cpu import cpu
from swiftspec.backends.reference import reference
from swiftspec.cache.kv import KVCache
from swiftspec.cache.model_cache import ModelCache
from swiftspec.errors import UserError
from swiftspec.lab import quantize
from swiftspec.lab.quantize import AwqMatrix
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.formats.awq import from_awq
from swiftspec.model.loader import load_model
from swiftspec.params import SamplingParams
from tests.support.gguf_files import write_gguf
from tests.support.tiny_checkpoints import chain, make_checkpoint, make_model

ROOT = Path(__file__).resolve().parents[2]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def rounded(dense: torch.Tensor, group: int) -> torch.Tensor:
    """Round-to-nearest, written independently: the nearest of the 16 values that a group can represent."""
    parts = dense.double().unflatten(1, (-1, group))
    low, high = parts.amin(2, keepdim=True).clamp_max(0), parts.amax(2, keepdim=True).clamp_min(0)
    scale = ((high - low).float() / 15).half().double()
    values = (torch.arange(16.0) - (-low / scale).round().clamp(0, 15)) * scale
    best = (parts.unsqueeze(3) - values.unsqueeze(2)).abs().argmin(3)
    return values.gather(2, best).flatten(1)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_rounded_to_the_nearest_value(
    group: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "CHUNK_OUTPUTS", 16)  # several chunks, the last one smaller
    dense = torch.randn(40, 256, generator=torch.Generator().manual_seed(group)).to(dtype)
    dense[3] = 0  # a group of zeros has the scale 0
    dense[4] = dense[4].abs() + 1  # a group without zero is extended to it
    before = dense.clone()
    made = AwqMatrix.of(dense, group)
    assert torch.equal(dense, before)
    assert (made.qweight.shape, made.qzeros.shape, made.scales.shape) == (
        (256, 5), (256 // group, 5), (256 // group, 40)
    )  # fmt: skip
    assert (made.qweight.dtype, made.scales.dtype) == (torch.int32, torch.float16)
    found = from_awq(made.qweight, made.qzeros, made.scales, group).dequantize(torch.float64)
    wanted = torch.nan_to_num(rounded(dense, group))
    step = made.scales.double().T.repeat_interleave(group, 1)
    near_tie = (dense.double() - wanted).abs() > 0.499 * step
    assert torch.allclose(found[~near_tie], wanted[~near_tie], atol=1e-6)
    assert ((found - dense.double()).abs() <= 0.5 * step + 1e-3 * dense.double().abs() + 1e-6).all()


def test_the_layout_is_that_of_autoawq() -> None:
    """A checkpoint that AutoAWQ has written: quantising its values again gives its tensors."""
    data = ROOT / "tests" / "data" / "awq_gemm_tiny"
    stored, dense = load_file(data / "model.safetensors"), load_file(data / "dequantized.safetensors")
    name = "model.layers.0.mlp.down_proj"
    matrix = dense[f"{name}.weight"].T.float().contiguous()
    again = AwqMatrix.of(matrix, 128)
    assert (again.qweight.shape, again.qzeros.shape) == (
        stored[f"{name}.qweight"].shape,
        stored[f"{name}.qzeros"].shape,
    )
    qweight, qzeros, scales = (stored[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
    theirs = from_awq(qweight, qzeros, scales, 128)
    ours = from_awq(again.qweight, again.qzeros, again.scales, 128)
    step = again.scales.float().amax()
    assert (ours.dequantize(torch.float32) - theirs.dequantize(torch.float32)).abs().max() <= step


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(
        path, hidden_size=128, intermediate_size=256, family="qwen2", dtype=torch.bfloat16, shards=3, tie=True
    )
    (path / "tokenizer.json").write_text("{}")
    (path / "generation_config.json").write_text('{"temperature": 0.5}')
    return path


@pytest.mark.parametrize("shard_bytes", [1 << 30, 1 << 16])
def test_the_result_loads_and_decodes(
    model: Path, tmp_path: Path, shard_bytes: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quantize, "SHARD_BYTES", shard_bytes)
    out = tmp_path / "new" / "out"
    assert main(["quantize", str(model), str(out)]) == 0
    assert f"{out}: 14 matrices in int4, groups of 128; " in capsys.readouterr().out
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 1 if shard_bytes < 1 << 30 else [file.name for file in files] == ["model.safetensors"]
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    dense = {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}
    kept = {name for name in dense if "_proj.weight" not in name}
    assert {name for name in tensors if not name.endswith(("qweight", "qzeros", "scales"))} == kept
    assert any("bias" in name for name in kept) and any("embed" in name for name in kept)
    assert all(torch.equal(tensors[name], dense[name]) for name in kept)
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 128, "zero_point": True,
        "modules_to_not_convert": None,
    }  # fmt: skip
    assert {"tokenizer.json", "generation_config.json"} <= {file.name for file in out.iterdir()}
    expanded = tmp_path / "expanded"  # the same values as a dense model
    expanded.mkdir()
    values = {name: tensors[name].float() for name in kept}
    for name in dense.keys() - kept:
        module = name.removesuffix(".weight")
        qweight, qzeros, scales = (tensors[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales"))
        values[name] = from_awq(qweight, qzeros, scales, 128).dequantize(torch.float32)
    save_file(values, expanded / "model.safetensors", metadata={"format": "pt"})
    del config["quantization_config"]
    (expanded / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    prompt = [5, 9, 11]
    wanted = LLMEngine(expanded, dtype="float64", device="cpu", ops="reference").generate(prompt, GREEDY).token_ids
    assert LLMEngine(out, dtype="float64", device="cpu", ops="reference").generate(prompt, GREEDY).token_ids == wanted
    if cpu.level() != "none":
        native = LLMEngine(out, dtype="float32", device="cpu").generate(prompt, GREEDY).token_ids
        assert native == wanted


def test_wide_weights_become_float16(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", hidden_size=128, intermediate_size=256, layers=1, dtype=torch.float32)
    quantize.quantize(tmp_path / "model", tmp_path / "out", 64)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.get_tensor("lm_head.weight").dtype == torch.float16
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config.get("dtype") or config.get("torch_dtype")) == "float16"
    assert config["quantization_config"]["group_size"] == 64


def test_routers_and_rates_stay_as_they_are(tmp_path: Path) -> None:
    """The result of hybrids with decays in float32 loads and decodes."""
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 8, "linear_value_head_dim": 16}
    make_checkpoint(tmp_path / "hybrid", family="qwen3_5_text", hidden_size=64, intermediate_size=64, head_dim=32,
                    linear_key_head_dim=16, **delta, dtype=torch.float32)  # fmt: skip
    make_checkpoint(tmp_path / "mixture", family="qwen3_moe", hidden_size=64, intermediate_size=64,
                    moe_intermediate_size=32, dtype=torch.bfloat16)  # fmt: skip
    make_checkpoint(tmp_path / "shared", family="qwen3_next", hidden_size=64, intermediate_size=64, head_dim=32,
                    linear_key_head_dim=16, **delta, moe_intermediate_size=32, shared_expert_intermediate_size=96,
                    dtype=torch.bfloat16)  # fmt: skip
    kept = {
        "hybrid": ("in_proj_a.weight", "in_proj_b.weight", "A_log"), "mixture": ("mlp.gate.weight",),
        "shared": ("in_proj_ba.weight", "mlp.gate.weight", "mlp.shared_expert_gate.weight", "A_log"),
    }  # fmt: skip
    for name, ends in kept.items():
        quantize.quantize(tmp_path / name, tmp_path / f"{name}-int4", 32)
        before, after = (load_file(tmp_path / each / "model.safetensors") for each in (name, f"{name}-int4"))
        there = [key for key in before if key.endswith(ends)]
        assert all(any(key.endswith(end) for key in there) for end in ends)
        for key in there:
            assert torch.allclose(after[key].float(), before[key].float(), rtol=1e-3, atol=1e-6)
        assert all(after[key].dtype == before[key].dtype for key in there if key.endswith("A_log"))
    for name in ("hybrid", "shared"):
        text = LLMEngine(tmp_path / f"{name}-int4", device="cpu", dtype="float32", ops="reference").generate(
            [3, 1, 4], GREEDY
        )
        assert len(text.token_ids) == GREEDY.max_tokens


def test_tensors_of_all_experts_become_matrices_of_each(tmp_path: Path) -> None:
    """The result is that of a checkpoint with the matrices of each expert."""
    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    theirs = make_checkpoint(tmp_path / "each", family="qwen3_5_moe_text", hidden_size=64, head_dim=32,
                             linear_num_value_heads=8, dtype=torch.bfloat16, **sizes)  # fmt: skip
    theirs.save_pretrained(tmp_path / "all", save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "all" / "model.safetensors")
    counts = [quantize.quantize(tmp_path / name, tmp_path / f"{name}-int4", 32) for name in ("each", "all")]
    assert counts[0][::2] == counts[1][::2], "matrices and bytes of the result"
    each, every = (load_file(tmp_path / f"{name}-int4" / "model.safetensors") for name in ("each", "all"))
    assert each.keys() == every.keys() and all(torch.equal(each[name], every[name]) for name in each)
    assert "model.layers.0.mlp.experts.5.up_proj.qweight" in each
    make_checkpoint(tmp_path / "odd", family="qwen3_5_moe_text", hidden_size=64, moe_intermediate_size=36)
    with pytest.raises(UserError, match=r"down_proj.* \[64, 36\] cannot be divided into groups of 32 inputs"):
        quantize.quantize(tmp_path / "odd", tmp_path / "out", 32)


def test_the_result_may_be_an_empty_directory(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the current one, and the target of a symbolic link."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    monkeypatch.chdir(tmp_path / "here")
    for out in (Path(), tmp_path / "link"):
        quantize.quantize(model, out, 128)
    assert all((tmp_path / name / "config.json").is_file() for name in ("here", "there"))


def test_a_partial_rope_that_separates_eights(tmp_path: Path) -> None:
    """24 of the 32 elements of a head are rotated, so rows that int4 packs together do not stay neighbours."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 32, "layers": 1}
    make_checkpoint(tmp_path / "model", family="phi3", rope=rope, **shape)
    quantize.quantize(tmp_path / "model", tmp_path / "out", 32)
    found: list[Tensor] = []
    for name in ("model", "out"):
        model = load_model(tmp_path / name, dtype=torch.float32, ops=reference, max_positions=32)
        kv = KVCache(1, model.kv_heads, 32, 16, reference.make_slot_mover, dtype=torch.float32)
        logits = model.forward(chain([*range(9)]), ModelCache(kv)).logits
        assert logits is not None
        found.append(logits)
    assert torch.cosine_similarity(*found, dim=-1).mean() > 0.9


def test_what_cannot_be_quantised_takes_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path / "narrow", hidden_size=96, intermediate_size=96, layers=1)
    bad = tmp_path / "bad"
    make_checkpoint(bad, hidden_size=128, intermediate_size=128, layers=1)
    weights = load_file(bad / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][3, 3] = torch.nan
    save_file(weights, bad / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "file").write_text("x")
    awq, out = ROOT / "tests" / "data" / "awq_gemm_tiny", tmp_path / "out"
    write_gguf(tmp_path / "model.gguf", make_model(hidden_size=64, intermediate_size=64, layers=1))
    cases: list[tuple[Any, Any, str, int]] = [
        (awq, out, "is quantised already (awq)", 1),
        (tmp_path / "model.gguf", out, "is a GGUF file: use the safetensors checkpoint that it was made from", 1),
        (tmp_path / "none", out, "no such directory", 1),
        (model, tmp_path / "narrow", "exists already: choose a new directory", 1),
        (model, tmp_path / "file" / "out", "cannot be written", 1),
        (tmp_path / "narrow", out, "cannot be divided into groups of 128 inputs: use --group-size 32", 1),
        (bad, out, "model.layers.0.mlp.up_proj.weight cannot be quantised: a weight is not finite", 1),
        (model, "", "the following arguments are required: OUT", 2),
    ]
    (tmp_path / "link").symlink_to(tmp_path / "narrow")
    cases.append((model, tmp_path / "link", "exists already: choose a new directory", 1))
    for source, target, words, code in cases:
        capsys.readouterr()
        assert main(["quantize", str(source), *([str(target)] if target else [])]) == code, words
        error = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
        assert len(error) == 1 and words in error[0], error
        assert not out.exists()
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")], "nothing is left behind"
