"""The race in the chat: both runs are the same request with and without the draft, and the verdict is correct."""

from __future__ import annotations

import os
import re
import signal

import pytest

from swiftspec.config import EngineConfig
from swiftspec.serve.cli.race import MAX_ANSWER_TOKENS
from swiftspec.settings.settings import Settings, env_name
from swiftspec.text.codec import TextCodec
from tests.serve.cli.test_chat import ChatRoom
from tests.support.toy_pair import byte_level_tokenizer, write_tokenizer


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec(write_tokenizer(tmp_path_factory.mktemp("codec"), byte_level_tokenizer()))


@pytest.fixture
def chat_room(toy: TextCodec, monkeypatch: pytest.MonkeyPatch) -> ChatRoom:
    for name in Settings.model_fields:
        monkeypatch.delenv(env_name(name), raising=False)
    return ChatRoom(toy)


def test_the_same_request_without_and_with_the_draft(chat_room: ChatRoom) -> None:
    output = chat_room.run("/set temperature 0.7", "one", "/race two", "three", EOFError)
    assert output.count("return a + b, read") == 4
    assert re.search(r"plain:\s+return[^:]*speculative:\s+return", output)
    tokens = len(chat_room.codec.encode(chat_room.engine.reply))
    assert f"the text is the same: all {tokens} tokens are equal" in output
    first, plain, fast, last = chat_room.engine.requests
    assert plain[0] == fast[0] == f"{first[0]}return a + b, read<|end|><|user|>two<|end|><|bot|>"
    assert plain[0].replace("two", "three") == last[0], "the conversation is as it was"
    assert (plain[1].verify_batch, fast[1].verify_batch, last[1].verify_batch) == (1, None, None)
    suffix_memory = [run[1].suffix_memory for run in (plain, fast, last)]
    assert suffix_memory == [False, False, True], "suffix lookup does not copy the answer of the plain run"
    assert plain[1].max_tokens == fast[1].max_tokens == MAX_ANSWER_TOKENS and last[1].max_tokens is None
    assert (plain[1].temperature, plain[1].seed) == (fast[1].temperature, fast[1].seed) == (0.7, last[1].seed)


def test_without_text_the_last_message_is_repeated(chat_room: ChatRoom) -> None:
    assert "error: there is no message yet: use /race TEXT" in chat_room.run("/race", EOFError)
    chat_room.run("/set max_tokens 9", "one", "/race", "/race two", "/race", EOFError)
    prompts = [prompt for prompt, _ in chat_room.engine.requests]
    assert prompts[0] == prompts[1] == prompts[2] and "two" in prompts[3]
    assert prompts[3] == prompts[4] == prompts[5] == prompts[6]
    assert {sampling.max_tokens for _, sampling in chat_room.engine.requests} == {9}


def test_raw_text(toy: TextCodec) -> None:
    chat_room = ChatRoom(toy, raw=True)
    chat_room.run("/race def f(", EOFError)
    assert [prompt for prompt, _ in chat_room.engine.requests] == ["def f("] * 2


@pytest.mark.parametrize("run", [1, 2])
def test_ctrl_c_ends_a_race(chat_room: ChatRoom, run: int) -> None:
    def stop() -> None:
        if len(chat_room.engine.requests) == run:
            os.kill(os.getpid(), signal.SIGINT)

    chat_room.engine.during = stop
    output = chat_room.run("/race one", EOFError)
    assert "the race was stopped" in output and "times as fast" not in output
    assert len(chat_room.engine.requests) == run


def test_a_different_text_is_reported(chat_room: ChatRoom) -> None:
    def other() -> None:
        chat_room.engine.reply = "return a - b"

    chat_room.engine.during = other
    both = zip(*(chat_room.codec.encode(reply) for reply in ("return a + b, read", "return a - b")), strict=False)
    apart = next(at for at, (a, b) in enumerate(both, 1) if a != b)
    assert f"THE TEXTS DIFFER from token {apart} on" in chat_room.run("/race one", EOFError)
    chat_room.engine.reply, chat_room.engine.config = "return a + b", EngineConfig(verify="reject")
    output = chat_room.run("/race one", EOFError)
    assert "the texts differ; their distribution is the same" in output and "NOT" not in output
    chat_room.engine.reply, chat_room.engine.config = "return a + b", EngineConfig(synthetic_acceptance_length=2)
    output = chat_room.run("/race one", EOFError)
    assert "with synthetic acceptance the speculative text is not the target's" in output and "DIFFER" not in output


@pytest.mark.parametrize("mode", ["ar", "smc"])
def test_a_race_needs_a_tree(chat_room: ChatRoom, mode: str) -> None:
    chat_room.engine.config = EngineConfig(mode)
    assert f"error: /race is not supported in mode {mode}" in chat_room.run("/race one", EOFError)
    assert chat_room.engine.requests == []
