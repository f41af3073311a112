"""Qwen3, the family with a norm of query and key heads: every mode, cache and number of ranks as for other models, on
library operators."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftspec.backends import cpu, cuda, reference, unfused
from swiftspec.builder.load_options import select_operators
from swiftspec.builder.model_pair import ModelPair
from swiftspec.config import EngineConfig
from swiftspec.llm import LLM
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.loader import load_model
from swiftspec.params import SamplingParams
from tests.support.tiny_checkpoints import make_checkpoint, make_pair

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, seed=7)
PROMPT = [5, 17, 3, 29, 11, 8, 2]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), family="qwen3", seed=3)


@pytest.mark.parametrize("ops", ["reference", "unfused"])
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_a_draft_does_not_change_the_text(pair: tuple[Path, Path], ops: str, cache: str) -> None:
    options: dict[str, Any] = {"dtype": torch.float64, "max_model_len": 128, "ops": ops, "kv_cache_dtype": cache}
    plain, tree = LLM(pair[0], **options), LLM(*pair, EngineConfig("serial"), **options)
    for sampling in (GREEDY, SEEDED):
        want = plain.generate(PROMPT, sampling).token_ids
        answer = tree.generate(PROMPT, sampling)
        assert answer.token_ids == want and answer.stats.accepted > 5 and len(set(want)) > 10


@pytest.fixture
def native_head(tmp_path: Path) -> Path:
    """A checkpoint whose other sizes the native operators support."""
    make_checkpoint(tmp_path, family="qwen3", hidden_size=128, head_dim=64, dtype=torch.bfloat16)
    return tmp_path


def test_native_operators_decline_with_one_line(native_head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if cpu.level() == "none":
        pytest.skip("there are no native operators here")
    monkeypatch.setattr(cuda, "require_usable", torch.device)
    spec = read_config(native_head).spec
    for device, library in (("cpu", reference), ("cuda", unfused)):
        assert select_operators("auto", spec, torch.bfloat16, torch.device(device)) is library
    lines: list[str] = []
    ModelPair.create(native_head, None, EngineConfig("ar"), None, {"note": lines.append})
    reason = "the CPU operators have no norm of query and key heads (qk_norm)"
    assert lines == [f"the target runs on torch's own operators: {reason}"]


def test_native_operators_never_ignore_the_norm(native_head: Path) -> None:
    """Even if a program requests them: no fused forward, and attention raises."""
    if cpu.level() == "none":
        pytest.skip("there are no native operators here")
    model = load_model(native_head, ops=cpu, max_positions=64)
    assert model.fused is None
    plan: Any = None
    with pytest.raises(AssertionError):
        cpu.tree_attention(torch.empty(0), plan, 0, model.stack.layers[0].qk_norm)
