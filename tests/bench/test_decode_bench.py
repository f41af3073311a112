"""bench/decode.py runs every system and prints what it writes; llama.cpp, where it is installed, has our weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from bench import decode, peers, to_gguf
from bench.heldout import DEMO, read_prompts
from swiftspec.errors import UserError
from swiftspec.llm import LLM
from swiftspec.model.config import ModelConfig
from swiftspec.params import SamplingParams
from tests.support.tiny import make_checkpoint

needs_llama_cpp = pytest.mark.skipif(not peers.has_llama_cpp(), reason="llama-cpp-python or gguf is not installed")


def run(monkeypatch: pytest.MonkeyPatch, out: Path) -> list[dict[str, object]]:
    argv = ["decode", "--limit", "1", "--repeats", "2", "--max-tokens", "8", "--threads", "1", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    decode.main()
    return json.loads(out.read_text())["systems"]


def test_a_run_without_llama_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode, "has_llama_cpp", lambda: False)
    rows = run(monkeypatch, tmp_path / "out.json")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "llama.cpp: not installed" and len(printed) == 2 + len(rows)
    ours = ["swiftspec ar", "swiftspec serial", "swiftspec ar, dense target", "swiftspec serial, dense target"]
    names = ["transformers", "transformers assisted", *ours]
    assert [row["system"] for row in rows] == names
    assert all(line.startswith(name) for line, name in zip(printed[2:], names, strict=True))
    assert all(row["same_text_as_transformers"] in (0, 1) for row in rows), "counted per prompt, not per request"


@needs_llama_cpp
def test_a_run_with_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row["system"]: row for row in run(monkeypatch, tmp_path / "out.json")}
    for kind in to_gguf.TYPES:
        row = rows[f"llama.cpp {kind}, 1 thread"]
        assert row["tokens_per_round"] == 1 and row["decode_tokens_per_second"] is not None


@needs_llama_cpp
@pytest.mark.parametrize("kind", to_gguf.TYPES)
def test_llama_cpp_chooses_our_tokens(tmp_path: Path, kind: str) -> None:
    """After each part of our greedy text; one near-tie in each may fall the other way."""
    to_gguf.write_gguf(DEMO / "target", tmp_path / "model.gguf", kind)
    llama, ours = peers.LlamaCpp(tmp_path / "model.gguf", 1, 0.0, 0), LLM(DEMO / "target", dtype=torch.bfloat16)
    for prompt in read_prompts(AutoTokenizer.from_pretrained(DEMO / "target"))[:2]:
        text = ours.generate(prompt, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)).token_ids
        theirs = [llama.generate(prompt + text[:i], 1)[0][0] for i in range(len(text))]
        assert sum(a != b for a, b in zip(text, theirs, strict=True)) <= 1


def test_a_dense_copy_has_the_same_weights(tmp_path: Path) -> None:
    peers.write_dense(DEMO / "target", tmp_path, torch.float32)
    here, there = (peers.dense_state(path, torch.float32) for path in (DEMO / "target", tmp_path))
    assert here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in here)
    assert ModelConfig.from_dir(tmp_path).quant is None


@needs_llama_cpp
def test_only_plain_llama_is_written(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family="qwen2")
    with pytest.raises(UserError, match="only Llama with plain RoPE"):
        to_gguf.write_gguf(tmp_path, tmp_path / "model.gguf", "bf16")
