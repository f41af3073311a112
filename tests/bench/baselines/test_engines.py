"""The same weights in other engines: dense copies and GGUF files. llama.cpp, if installed, chooses the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from bench.baselines import engines, llama_plain, to_gguf
from bench.data.heldout import DEMO, read_prompts
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.checkpoint_files import read_config
from swiftspec.params import SamplingParams
from tests.support.tiny_checkpoints import make_checkpoint

needs_llama_cpp = pytest.mark.skipif(not llama_plain.has_llama_cpp(), reason="llama-cpp-python is not installed")


@needs_llama_cpp
@pytest.mark.parametrize("kind", to_gguf.TYPES)
def test_llama_cpp_chooses_the_same_tokens(tmp_path: Path, kind: str) -> None:
    """Compares after each part of our greedy text; one near-tie per part may be decided differently."""
    to_gguf.write_gguf(DEMO / "target", tmp_path / "model.gguf", kind)
    llama, ours = llama_plain.LlamaCpp(tmp_path / "model.gguf", 1), LLMEngine(DEMO / "target", dtype=torch.bfloat16)
    for prompt in read_prompts(AutoTokenizer.from_pretrained(DEMO / "target"))[:2]:
        text = ours.generate(prompt, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)).token_ids
        theirs = [llama.generate(prompt + text[:i], 1)[0][0] for i in range(len(text))]
        assert sum(a != b for a, b in zip(text, theirs, strict=True)) <= 1


def test_a_dense_copy_has_the_same_weights(tmp_path: Path) -> None:
    engines.write_dense(DEMO / "target", tmp_path, torch.float32)
    original, copied = (engines.dense_state(path, torch.float32) for path in (DEMO / "target", tmp_path))
    assert original.keys() == copied.keys() and all(torch.equal(original[name], copied[name]) for name in original)
    assert read_config(tmp_path).quantization == {}


def test_only_unmodified_llama_models_are_written(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family="qwen2")
    with pytest.raises(UserError, match="only Llama without biases and with unscaled RoPE"):
        to_gguf.write_gguf(tmp_path, tmp_path / "model.gguf", "bf16")
