"""Guidance on the command line: processing of the negative prompt, and the messages."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from swiftspec import llm_engine
from swiftspec.serve.__main__ import main
from swiftspec.settings.settings import Settings, env_name
from tests.support.toy_pair import byte_level_tokenizer, make_pair


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    target, draft = make_pair(tmp_path_factory.mktemp("pair"))
    ask = ["--prompt", "def add(a, b):\n", "--threads", "1", "--temperature", "0", "--max-tokens", "20", "--json"]
    return ["--model", str(target), "--draft-model", str(draft), *ask]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in map(env_name, Settings.model_fields):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))


def ask(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[dict[str, Any], str]:
    """The answer, and the lines on stderr."""
    capsys.readouterr()
    assert main(argv) == 0
    output = capsys.readouterr()
    return json.loads(output.out), output.err


def test_a_negative_prompt_is_processed_like_a_prompt(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    tokens = byte_level_tokenizer().encode("class", add_special_tokens=False).ids
    guided = [*flags, "--guidance-scale", "3", "--negative-prompt", "class"]
    answer, err = ask(capsys, *guided)
    assert err == "" and answer["guidance"] == {
        "guidance_scale": 3.0,
        "negative_prompt_token_ids": [1, *tokens, 0, 2],
    }
    assert ask(capsys, *guided, "--mode", "ar")[0]["token_ids"] == answer["token_ids"]
    assert ask(capsys, *guided, "--negative-prompt", "x")[0]["token_ids"] != answer["token_ids"]
    assert ask(capsys, *guided, "--raw")[0]["guidance"]["negative_prompt_token_ids"] == tokens


def test_startup_messages(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    answer, err = ask(capsys, *flags, "--guidance-scale", "3")
    assert err == "swiftspec: warning: guidance without a negative prompt uses an empty one\n"
    assert answer["guidance"]["negative_prompt_token_ids"] == [1, 0, 2]
    answer, err = ask(capsys, *flags, "--negative-prompt", "a")
    assert "--negative-prompt has no effect at --guidance-scale 1" in err and "guidance" not in answer


def test_a_draft_that_samples_differently_is_warned_about(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    drawn = [*flags, "--speculative-config.proposal", "top", "--temperature"]
    assert ask(capsys, *drawn, "1")[1].startswith("swiftspec: warning: proposal top does not use the target's noise")
    assert ask(capsys, *drawn, "0")[1] == ""


def test_invalid_sampling_is_refused_before_weights_are_loaded(
    capsys: pytest.CaptureFixture[str], flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm_engine, "LLMEngine", None)
    assert main([*flags, "--verify", "reject"]) == 1
    assert "temperature 0 is not supported with --speculative-config.proposal sample" in capsys.readouterr().err
