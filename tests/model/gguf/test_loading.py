"""GGUF files as models: the logits equal those of a Hugging Face checkpoint with the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cpu import cpu
from swiftspec.backends.reference import reference
from swiftspec.cache.kv import KVCache
from swiftspec.cache.model_cache import ModelCache
from swiftspec.config import EngineConfig
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.checkpoint_files import open_tensors, read_config
from swiftspec.model.fingerprint import fingerprint
from swiftspec.model.formats.int8 import LoadTimeQuantization
from swiftspec.model.gguf.config import gguf_config
from swiftspec.model.gguf.file import GgufFile
from swiftspec.model.gguf.rope import ROPE_FREQS
from swiftspec.model.loader import load_model
from swiftspec.params import SamplingParams
from tests.model.test_loader import TOKENS, logits
from tests.support.gguf_files import SHAPE, write_gguf, write_twin
from tests.support.thread_group import ThreadGroup, on_ranks
from tests.support.tiny_checkpoints import ROPES, chain, make_model

MIXED = {"v_proj": "Q6_K", "down_proj": "Q5_K", "embed_tokens": "Q8_0", "lm_head": "Q6_K"}  # others: Q4_K
TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}


def mixed(name: str) -> str:
    return next((kind for part, kind in MIXED.items() if part in name), "Q4_K")


def pair(folder: Path, kind: str, **model: Any) -> tuple[Path, Path]:
    """A GGUF file of one type of tensors, or of several for "mixed", and a checkpoint with the same values."""
    built = make_model(**{"vocab": 64, "layers": 1, **SHAPE, **model})
    path = folder / f"{kind}.gguf"
    values = write_gguf(path, built, mixed if kind == "mixed" else lambda name: kind)
    return path, write_twin(folder / f"twin-{kind}", built, values)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "mixed"])
def test_a_llama_of_each_type(tmp_path: Path, kind: str) -> None:
    path, twin = pair(tmp_path, kind, family="llama", tie=kind == "Q8_0")
    want = logits(twin, dtype=torch.float32)
    torch.testing.assert_close(logits(path, dtype=torch.float32), want, **TOLERANCE)
    if _C.level() != "none":
        torch.testing.assert_close(logits(path, dtype=torch.float32, ops=cpu), want, **TOLERANCE)


@pytest.mark.parametrize("kind", ["Q4_1", "mixed"])
def test_two_ranks(tmp_path: Path, kind: str) -> None:
    """Whole blocks of the MLP on each rank, and heads of a part of a block of 256."""
    path, _ = pair(tmp_path, kind, family="llama", intermediate_size=512)

    def work(group: ThreadGroup) -> Tensor:
        model = load_model(path, dtype=torch.float32, ops=reference, max_positions=64, group=group)
        kv = KVCache(1, model.kv_heads, 64, 32, reference.make_slot_mover, dtype=torch.float32)
        found = model.forward(chain(TOKENS), ModelCache(kv)).logits
        assert found is not None
        return found

    both = torch.cat(on_ranks(2, work), 1)[:, :64]
    torch.testing.assert_close(both, logits(path, dtype=torch.float32), **TOLERANCE)


@pytest.mark.skipif(_C.level() == "none", reason="this CPU has no AVX2")
def test_int8_activations(tmp_path: Path) -> None:
    """The native operators compute the logits of the reference, whose products define this arithmetic."""
    path, _ = pair(tmp_path, "mixed", family="llama")
    options: dict[str, Any] = {"dtype": torch.float32, "quantization": LoadTimeQuantization(activations=1)}
    torch.testing.assert_close(logits(path, ops=cpu, **options), logits(path, **options), rtol=1e-3, atol=1e-3)


def test_the_configuration_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    path, twin = pair(tmp_path, "Q4_1", family="llama")
    ours, theirs = read_config(path), read_config(twin)
    assert ours.spec == theirs.spec and ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.eos_token_ids == theirs.eos_token_ids == (2,) and ours.dtype == "bfloat16"
    assert len(fingerprint(path)) == 64


def test_an_answer(tmp_path: Path) -> None:
    """Also with another GGUF file as the draft, which changes no token."""
    path, twin = pair(tmp_path, "Q4_0", family="llama")
    draft, _ = pair(tmp_path, "Q8_0", family="llama", seed=1)
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    answers: list[list[int]] = []
    for target, other in ((path, None), (twin, None), (path, draft)):
        plan = EngineConfig("ar") if other is None else EngineConfig("serial")
        llm = LLMEngine(target, other, plan, max_model_len=64, ops="reference", dtype="float64")
        answers.append(list(llm.generate([5, 9, 7], greedy).token_ids))
        llm.close()
    assert answers[0] == answers[1] == answers[2] and len(answers[0]) == 16


def llama3_factors(head_dim: int) -> Tensor:
    """As llama.cpp's convert_hf_to_gguf.py writes them, for a theta of 500000 and a factor of 32."""
    factors: list[float] = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * torch.pi * 500000.0 ** (i / head_dim)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(32.0)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / 32 + smooth))
    return torch.tensor(factors)


def test_the_rope_of_llama_3(tmp_path: Path) -> None:
    rope = {**ROPES["llama3"], "factor": 32.0, "original_max_position_embeddings": 8192}
    built = make_model(family="llama", rope=rope, **SHAPE)
    path, factors = tmp_path / "llama3.gguf", llama3_factors(64).numpy()
    assert len({*factors.tolist()}) > 3
    values = write_gguf(path, built, metadata=lambda writer: writer.add_tensor(ROPE_FREQS, factors))
    twin = write_twin(tmp_path / "twin", built, values)
    torch.testing.assert_close(logits(path, dtype=torch.float32), logits(twin, dtype=torch.float32), **TOLERANCE)
    write_gguf(path, built, metadata=lambda writer: writer.add_tensor(ROPE_FREQS, 2 * factors))
    assert read_config(path).spec.layer.attention.rope.long_factors == pytest.approx(2 * factors)
    write_gguf(path, built, metadata=lambda writer: writer.add_tensor(ROPE_FREQS, factors[1:]))
    with pytest.raises(UserError, match="half as many numbers as are rotated"):
        read_config(path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("general.architecture", "mamba", "architecture 'mamba' is not supported; docs/guides/families.md"),
        ("general.architecture", "clip", "the vision part (mmproj) of a multimodal model; use the file of its text"),
        ("llama.rope.dimension_count", 16, "RoPE of 16 of 64 dimensions"),
        ("llama.rope.scaling.type", "su", "RoPE type 'su' is not supported in GGUF files; none, linear, yarn and long"),
        ("llama.rope.scale_linear", 0.5, "rope.scale_linear 0.5 is not supported"),
        ("split.count", 3, "merge them"),
        ("llama.block_count", "two", "num_hidden_layers must be a whole number"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, key: str, value: object, words: str) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, make_model(family="llama", layers=1, **SHAPE))
    file = GgufFile.read(path)
    changed = GgufFile(path, {**file.metadata, key: value}, file.tensors)
    with pytest.raises(UserError) as caught:
        gguf_config(changed)
    assert words in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_tensors(tmp_path: Path) -> None:
    path, _ = pair(tmp_path, "Q4_0", family="llama")
    seen: list[int] = []
    tensors = open_tensors(path, lambda name, done, total: seen.append(done))
    assert "output_norm.weight" in tensors and "blk.0.attn_q.weight" not in tensors
    with pytest.raises(UserError, match=r"output_norm\.weight has shape \[256\], the metadata imply \[255\]"):
        tensors.take("output_norm.weight", 255)
    with pytest.raises(UserError, match="tensor nothing is missing"):
        tensors.take("nothing", 1)
    with pytest.raises(UserError, match=r"tensor blk\.0\.attn_k\.weight is not part of the architecture"):
        tensors.check_all_taken()
    tensors.skip("blk.0.")
    tensors.take("output_norm.weight", 256)
    assert seen == sorted(seen) and seen[-1] > 0
    path.write_bytes(path.read_bytes())
    with pytest.raises(UserError, match="was changed while it was read"):
        tensors.take("output_norm.weight", 256)
