"""Qwen3, the family with a norm of query and key heads: every mode and cache as for other models, and which operators
take it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftspec.backends.cpu import cpu
from swiftspec.backends.cuda import cuda
from swiftspec.builder.load_options import select_operators
from swiftspec.builder.plan import Plan
from swiftspec.config import EngineConfig
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.packed_model import AttentionOptions
from swiftspec.params import SamplingParams
from tests.support.tiny_checkpoints import make_checkpoint, make_pair

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, seed=7)
PROMPT = [5, 17, 3, 29, 11, 8, 2]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), family="qwen3", seed=3)


@pytest.mark.parametrize(("ops", "cache"), [("reference", "fp8"), ("unfused", "auto")])
def test_a_draft_does_not_change_the_text(pair: tuple[Path, Path], ops: str, cache: str) -> None:
    options: dict[str, Any] = {"dtype": torch.float64, "max_model_len": 128, "ops": ops, "kv_cache_dtype": cache}
    plain, tree = LLMEngine(pair[0], **options), LLMEngine(*pair, EngineConfig("serial"), **options)
    for sampling in (GREEDY, SEEDED):
        want = plain.generate(PROMPT, sampling).token_ids
        answer = tree.generate(PROMPT, sampling)
        assert answer.token_ids == want and answer.stats.accepted > 5 and len(set(want)) > 10


@pytest.fixture
def native_head(tmp_path: Path) -> Path:
    """A checkpoint whose sizes the native operators support."""
    make_checkpoint(tmp_path, family="qwen3", hidden_size=128, head_dim=64, dtype=torch.bfloat16)
    return tmp_path


def test_the_native_and_the_cuda_operators_have_the_norm(native_head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if cpu.level() == "none":
        pytest.skip("there are no native operators here")
    monkeypatch.setattr("swiftspec.backends.cuda.require_usable", torch.device)
    spec = read_config(native_head).spec
    for device, library in (("cpu", cpu), ("cuda", cuda)):
        assert select_operators("auto", spec, torch.bfloat16, torch.device(device)) is library


@pytest.mark.parametrize(
    ("family", "missing"),
    [
        ("olmo2", r"no norm of whole query and key projections \(qk_norm=projection\)"),
        ("hunyuan_v1_dense", r"no norm of query and key heads after RoPE \(norm_after_rope\)"),
    ],
)
def test_the_cuda_operators_decline_other_norms(tmp_path: Path, family: str, missing: str) -> None:
    make_checkpoint(tmp_path, family=family, hidden_size=128, head_dim=64, dtype=torch.bfloat16)
    with pytest.raises(UserError, match=f"{missing}; use ops unfused"):
        cuda.check_spec(read_config(tmp_path).spec, torch.bfloat16)


def test_a_model_that_native_operators_decline_gets_one_line(tmp_path: Path) -> None:
    if cpu.level() == "none":
        pytest.skip("there are no native operators here")
    make_checkpoint(tmp_path, family="qwen3", head_dim=8, dtype=torch.bfloat16)
    lines: list[str] = []
    Plan.create(tmp_path, None, EngineConfig("ar"), None, {"note": lines.append})
    reason = "the CPU operators need a head dimension that is a multiple of 16 and at most 512, not 8"
    assert lines == [f"the target runs on torch's own operators: {reason}"]


def test_operators_without_a_feature_never_ignore_it() -> None:
    """Even if a program requests it: attention raises."""
    tables = torch.empty(0, 0)
    batch: Any = None
    cache: Any = None
    with pytest.raises(AssertionError):
        cuda.prepare(batch, cache, tables, tables, 1, AttentionOptions(window=3))
