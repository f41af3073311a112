"""`swiftspec pair`: which models of the cache and of directories can draft for a target, and why others cannot."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from bench import pair
from bench.pair import LocalModel, PairedDraft, PairFinder, RefusedDraft, format_pairs, main, models_in, parameters
from bench.prediction.latency_model import GPUS, constants
from bench.prediction.machine import PredictedMachine
from swiftspec.model.checkpoint_files import read_config
from tests.support.gguf_files import write_gguf
from tests.support.tiny_checkpoints import make_checkpoint, make_model
from tests.support.toy_pair import (
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    make_pair,
    random_weights,
    write_model,
    write_tokenizer,
)

MACHINE = PredictedMachine("h200x2", constants(GPUS["h200"]), 2)


def small(folder: Path, tokenizer: Any = None, **config: object) -> Path:
    """A model of a few weights, which are never read."""
    (folder / "model").mkdir(parents=True)
    shutil.rmtree(folder / "model")
    write_model(folder, random_weights(1), **{"vocab_size": 320, "hidden_size": 8, "intermediate_size": 8, **config})
    return folder if tokenizer is None else write_tokenizer(folder, tokenizer)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_pair(folder)
    (folder / "draft").rename(folder / "as-large")
    small(folder / "good", byte_level_tokenizer())
    small(folder / "renamed", byte_level_tokenizer(("<|end|>", "<|bot|>", "<|user|>")))
    small(folder / "other", byte_fallback_tokenizer())
    small(folder / "bare")
    small(folder / "short", vocab_size=100)
    small(folder / "weightless", byte_level_tokenizer())
    (folder / "weightless" / "model.safetensors").unlink()
    small(folder / "mamba", architectures=["MambaForCausalLM"], model_type="mamba")
    return folder


def test_every_model_is_a_draft_or_has_a_reason(models: Path) -> None:
    finder = PairFinder(models / "target", MACHINE)
    found = {name: finder.check(LocalModel(name, models / name)) for name in (
        "good", "renamed", "bare", "as-large", "other", "short", "weightless", "mamba",
    )}  # fmt: skip
    drafts = {name: each for name, each in found.items() if isinstance(each, PairedDraft)}
    assert drafts.keys() == {"good", "renamed", "bare"}
    assert drafts["good"].note is None and "must have been trained with" in (drafts["bare"].note or "")
    assert "never proposes 2 special tokens" in (drafts["renamed"].note or "")
    reasons = {name: each.reason for name, each in found.items() if isinstance(each, RefusedDraft)}
    for name, words in {
        "as-large": "not smaller than the target", "other": "have different tokenizers", "weightless": "no weights",
        "short": "no tokenizer, and the target's has 300 tokens for 100 rows", "mamba": "MambaForCausalLM",
    }.items():  # fmt: skip
        assert words in reasons[name] and "\n" not in reasons[name]
    for each in drafts.values():
        assert each.best is not None and each.plain is not None
        assert each.best.mode != "ar" and each.plain.mode == "ar"
        assert 0 < each.best.low <= each.best.speed <= each.best.high


def test_a_hybrid_is_a_draft_without_a_prediction(models: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "head_dim": 4, "layers": 2}
    kinds = ["linear_attention", "full_attention"]
    make_checkpoint(tmp_path, family="qwen3_5_text", vocab=320, layer_types=kinds, **sizes)
    found = PairFinder(models / "target", MACHINE).check(LocalModel("hybrid", tmp_path))
    assert isinstance(found, PairedDraft) and found.best is None
    assert "hybrid" in format_pairs([found], MACHINE)


def test_the_number_of_parameters(models: Path) -> None:
    config = read_config(models / "target")
    stored = sum(tensor.numel() for name, tensor in random_weights(0).items() if "norm" not in name)
    assert parameters(config) == stored


@pytest.mark.slow
def test_the_command(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "hub"
    snapshot = cache / "models--toy--good" / "snapshots" / ("0" * 40)
    shutil.copytree(models / "good", snapshot)
    (cache / "models--toy--good" / "refs").mkdir()
    (cache / "models--toy--good" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(pair, "this_machine", lambda: MACHINE)
    assert main([str(models / "target"), str(models)]) == 0
    out = capsys.readouterr().out
    table, _, rest = out.partition("\n\n")
    assert [line.split()[0] for line in table.splitlines()[1:4]] == ["toy/good", str(models / "bare"),
                                                                     str(models / "good")]  # fmt: skip
    assert "async 1+1" in table or "serial 2" in table
    assert f"{models / 'target'}: " not in out and str(models / "target") not in table, "no draft of itself"
    assert "not drafts:" in rest and f"{models / 'other'}: target" in rest and "predicted for h200x2" in rest
    monkeypatch.setattr(pair, "this_machine", lambda: None)
    assert main([str(models / "target"), str(models / "good")]) == 0
    out = capsys.readouterr().out
    assert "the latency model does not know this GPU" in out and "toy/good" in out and "tok/s: predicted" not in out
    assert main([str(models / "target"), str(models / "good"), "--hardware", "h100x1"]) == 0
    assert "predicted for h100x1" in capsys.readouterr().out


def test_gguf_files_are_models(tmp_path: Path) -> None:
    """By their name, and in a directory."""
    write_gguf(tmp_path / "small.gguf", make_model(hidden_size=64, intermediate_size=64, layers=1))
    found = [[model.path for model in models_in(path)] for path in (tmp_path / "small.gguf", tmp_path)]
    assert found == [[tmp_path / "small.gguf"]] * 2
