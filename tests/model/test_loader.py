"""Checkpoint directories: valid ones load, invalid ones are refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from swiftspec.backends.reference import reference
from swiftspec.cache.kv import KVCache
from swiftspec.cache.model_cache import ModelCache
from swiftspec.errors import UserError
from swiftspec.model.checkpoint_files import open_tensors
from swiftspec.model.formats.int4 import AWQ_ORDER
from swiftspec.model.loader import load_model
from swiftspec.model.transformer import Transformer
from tests.model.test_weights import words
from tests.support.tiny_checkpoints import chain, make_checkpoint

TOKENS = [5, 17, 3, 29, 11, 8, 2, 30]
WEIGHTS = "model.safetensors"
DATA = Path(__file__).parents[1] / "data"
NOT_QUANTISED = ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight")
QUANTISED = [[f"{name}_proj", "weight"] for name in ("q", "k", "v", "o", "gate", "up", "down")]
QUANTISED += [[f"in_proj_{name}", "weight"] for name in ("qkvz", "ba")]


def load(path: Path, **options: Any) -> Transformer:
    return load_model(path, **({"dtype": torch.float64, "ops": reference, "max_positions": 64} | options))


def logits(path: Path, **options: Any) -> Tensor:
    model = load(path, **options)
    mixer, layers = model.spec.layer.attention, len(model.spec.layers)
    kv = KVCache(layers, mixer.num_kv_heads, mixer.head_dim, 32, reference.make_slot_mover, dtype=model.dtype)
    out = model.forward(chain(TOKENS), ModelCache(kv)).logits
    assert out is not None
    return out


def change_config(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def change_tensors(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS)


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("master")
    make_checkpoint(path, dtype=torch.bfloat16)
    return path


@pytest.fixture
def single(master: Path, tmp_path: Path) -> Path:
    """A valid checkpoint of one file, for tests that damage it."""
    return Path(shutil.copytree(master, tmp_path / "model"))


def test_the_dtype_defaults_to_the_config(single: Path) -> None:
    assert load(single, dtype=None).dtype == torch.bfloat16
    assert load(single, dtype=torch.float32).dtype == torch.float32


def test_shards_and_progress(tmp_path: Path, single: Path) -> None:
    make_checkpoint(tmp_path / "shards", dtype=torch.bfloat16, shards=3)
    files = sorted(file.name for file in (tmp_path / "shards").glob("*.safetensors"))
    assert len(files) >= 3
    progress: list[tuple[str, int, int]] = []
    load(tmp_path / "shards", progress=lambda *step: progress.append(step))
    size = sum((tmp_path / "shards" / file).stat().st_size for file in files)
    done = [step[1] for step in progress]
    assert {(name, count) for name, _, count in progress} == {("shards", size)}
    assert done[0] == 0 < done[1] and done == sorted(done) and 0.5 * size < done[-1] <= size
    assert torch.equal(logits(tmp_path / "shards"), logits(single))


def test_a_file_that_changes_while_it_is_read(single: Path) -> None:
    tensors = open_tensors(single)
    change_tensors(single, lambda found: found["model.norm.weight"].zero_())
    with pytest.raises(UserError, match="was changed while it was read"):
        tensors.take("model.norm.weight", 32)


def test_open_tensors(single: Path) -> None:
    tensors = open_tensors(single)
    assert "model.norm.weight" in tensors and "model.nonsense" not in tensors
    assert tensors.take("model.norm.weight", 32).shape == (32,)
    with pytest.raises(UserError, match=r"tensor lm_head\.weight is not part"):
        tensors.check_all_taken()


def test_a_tied_head_may_also_be_stored(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tie=True)
    want = logits(tmp_path)

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    change_tensors(tmp_path, spoil)
    assert torch.equal(logits(tmp_path), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_head_that_differs_from_tied_embeddings_is_used(tmp_path: Path, dtype: torch.dtype) -> None:
    """As transformers does: the checkpoint equals an untied one with the same tensors."""
    make_checkpoint(tmp_path / "tied", tie=True, dtype=torch.bfloat16)

    def own_head(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = -tensors["model.embed_tokens.weight"].to(dtype)

    change_tensors(tmp_path / "tied", own_head)
    shutil.copytree(tmp_path / "tied", tmp_path / "untied")
    change_config(tmp_path / "untied", tie_word_embeddings=False)
    assert torch.equal(logits(tmp_path / "tied"), logits(tmp_path / "untied"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "tied", dtype=torch.float64)
    with torch.no_grad():
        want = theirs(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits(tmp_path / "tied"), want, rtol=1e-3, atol=1e-4)
    change_tensors(tmp_path / "tied", lambda tensors: tensors.update({"lm_head.weight": torch.ones(3, 32)}))
    with pytest.raises(UserError, match=r"lm_head\.weight has shape \[3, 32\]"):
        load(tmp_path / "tied")


def quantise(path: Path, layout: str, skip: tuple[str, ...] = (), group: int = 32) -> Path:
    """Rewrites a valid checkpoint in int4; returns one whose rounded weights are dense, for comparison."""
    twin = Path(shutil.copytree(path, path.parent / "twin"))
    random = torch.Generator().manual_seed(0)
    packed, rounded = load_file(path / WEIGHTS), load_file(path / WEIGHTS)
    for name in [n for n in packed if n.split(".")[-2:] in QUANTISED and not any(s in n for s in skip)]:
        rows, columns = packed.pop(name).shape
        codes = torch.randint(0, 16, (columns, rows), generator=random)
        zeros = torch.randint(6, 10, (columns // group, rows), generator=random)
        scales = (0.02 + 0.03 * torch.rand(columns // group, rows, generator=random)).half()
        matrix = ((codes.unflatten(0, (-1, group)) - zeros.unsqueeze(1)) * scales.double().unsqueeze(1)).flatten(0, 1)
        rounded[name] = matrix.T.contiguous()
        module = name.removesuffix(".weight")
        if layout == "awq":
            packed[f"{module}.qweight"] = words(codes.numpy(), AWQ_ORDER)
            packed[f"{module}.qzeros"] = words(zeros.numpy(), AWQ_ORDER)
            packed[f"{module}.scales"] = scales
        else:
            packed[f"{module}.weight_packed"] = words(codes.T.contiguous().numpy())
            packed[f"{module}.weight_zero_point"] = words(zeros.numpy()).T.contiguous()
            packed[f"{module}.weight_scale"] = scales.T.contiguous()
            packed[f"{module}.weight_shape"] = torch.tensor([rows, columns])
    save_file(packed, path / WEIGHTS)
    save_file(rounded, twin / WEIGHTS)
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": group}
    quant = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    if layout != "awq":
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        quant = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    change_config(path, quantization_config=quant)
    return twin


@pytest.mark.parametrize("layout", ["awq", "pack-quantized"])
@pytest.mark.parametrize("skip", [(), ("k_proj", "layers.1.mlp")])
def test_int4(tmp_path: Path, layout: str, skip: tuple[str, ...]) -> None:
    path = tmp_path / "model"
    make_checkpoint(path, family="qwen2", dtype=torch.float64, intermediate_size=64)
    twin = quantise(path, layout, skip)
    torch.testing.assert_close(logits(path), logits(twin))


@pytest.mark.parametrize(
    "name", ["awq_gemm_tiny", "compressed_tensors_tiny/symmetric", "compressed_tensors_tiny/asymmetric"]
)
def test_int4_as_its_tools_write_it(tmp_path: Path, name: str) -> None:
    """The same logits as with the weights unpacked by those tools."""
    twin = Path(shutil.copytree(DATA / name, tmp_path / "twin"))
    unpacked = load_file(twin / "dequantized.safetensors")
    dense = {k: v for k, v in load_file(twin / WEIGHTS).items() if k in NOT_QUANTISED or "layernorm" in k}
    save_file(dense | {k: v.T.contiguous() for k, v in unpacked.items()}, twin / WEIGHTS)
    change_config(twin, quantization_config=None)
    assert torch.equal(logits(DATA / name, dtype=None), logits(twin, dtype=None))


def refused(path: Path, *names: str) -> None:
    with pytest.raises(UserError) as caught:
        load(path)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400
    for name in names:
        assert name in text, text


def test_directories_without_a_checkpoint(tmp_path: Path, single: Path) -> None:
    refused(tmp_path / "none", "no such directory")
    (single / WEIGHTS).rename(single / "pytorch_model.bin")
    refused(single, "pickle weights", "convert them to safetensors")
    (single / "pytorch_model.bin").unlink()
    refused(single, "no weights", WEIGHTS)
    (single / "config.json").unlink()
    refused(single, "no config.json")


@pytest.mark.parametrize("length", [0, 4, 200, -1])
def test_a_truncated_file(single: Path, length: int) -> None:
    data = (single / WEIGHTS).read_bytes()
    (single / WEIGHTS).write_bytes(data[:length])
    refused(single, WEIGHTS, "damaged")


def test_a_file_of_random_bytes(single: Path) -> None:
    (single / WEIGHTS).write_bytes(bytes(range(256)) * 40)
    refused(single, WEIGHTS, "damaged")
    (single / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(single, WEIGHTS, "a pointer of Git LFS", "git lfs pull")


def test_shards_without_an_index(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, shards=3)
    want = logits(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    sound = index.read_text()
    index.unlink()
    assert torch.equal(logits(tmp_path), want)
    first, *_ = sorted(tmp_path.glob("*.safetensors"))
    tensors = {name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    first.unlink()
    refused(tmp_path, first.name, "not found, but other shards are there")
    save_file(tensors, tmp_path / "weights.safetensors")
    for file in tmp_path.glob("model-*"):
        file.unlink()
    refused(tmp_path, "no weights", "not 'weights.safetensors'")
    (tmp_path / "weights.safetensors").rename(tmp_path / WEIGHTS)
    index.write_text(sound)  # stale
    assert torch.equal(logits(tmp_path), want)


def test_shards_and_their_index(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, shards=3)
    index = tmp_path / "model.safetensors.index.json"
    sound = json.loads(index.read_text())
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    refused(tmp_path, shard.name, "damaged")
    shard.unlink()
    refused(tmp_path, shard.name, "not found")
    for file in ("../model.safetensors", "/etc/passwd"):
        index.write_text(json.dumps(sound | {"weight_map": {"model.norm.weight": file}}))
        refused(tmp_path, file, "plain file name")
    for text in ("{", "{}", "[]", '{"weight_map": 3}', '{"weight_map": {}}'):
        index.write_text(text)
        refused(tmp_path, index.name)


def test_missing_and_extra_tensors(single: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensors(single, lambda tensors: tensors.pop(name))
    refused(single, name, "missing")


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.q_proj.g_idx", "model.layers.2.mlp.x"],
)
def test_extra_tensors(single: Path, name: str) -> None:
    change_tensors(single, lambda tensors: tensors.update({name: torch.ones(32)}))
    refused(single, name, "is not part of the architecture")


def test_shapes_and_kinds(single: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    change_tensors(single, lambda tensors: tensors.update({name: torch.ones(8, 32)}))
    refused(single, name, "[8, 32]", "[16, 32]")
    change_tensors(single, lambda tensors: tensors.update({name: torch.ones(16, 32).to(torch.float8_e4m3fn)}))
    refused(single, name, "float8_e4m3fn")


def test_a_missing_head(single: Path) -> None:
    change_tensors(single, lambda tensors: tensors.pop("lm_head.weight"))
    refused(single, "lm_head.weight", "missing")


def test_int4_with_invalid_shapes(tmp_path: Path) -> None:
    path = tmp_path / "model"
    make_checkpoint(path, dtype=torch.float64, intermediate_size=64)
    quantise(path, "pack-quantized")
    name = "model.layers.0.mlp.up_proj"
    change_tensors(path, lambda tensors: tensors.update({f"{name}.weight_shape": torch.tensor([64, 33])}))
    refused(path, f"{name}.weight_shape", "[64, 33]")
    change_tensors(path, lambda tensors: tensors.pop(f"{name}.weight_scale"))
    refused(path, f"{name}.weight_scale", "missing")
    change_config(path, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"})
    refused(path, "int4 groups")


def test_the_wrong_quantisation(single: Path) -> None:
    change_config(single, quantization_config={"quant_method": "awq", "version": "gemv"})
    refused(single, "gemv", "config.json")
