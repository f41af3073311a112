"""`n` and `best_of`: texts of a population as choices, each with its weight; and invalid requests."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from tests.serve.http.test_app import CHAT, HELLO, MESSAGES, TEXT, refused
from tests.support.http import READY, Player

PLAN = {"mode": "smc", "population": {"particles": 4, "power": 1.0}}
POPULATION = msgspec.structs.replace(READY, plan=PLAN)
ASK: dict[str, Any] = {"prompt": "a", "max_tokens": 50, "smc": {}}
ANSWER = [("return a + b\n", "stop", 0.5), ("return a - b", "length", 0.25), ("pass", "stop", 0.25)]


@pytest.fixture(autouse=True)
def particles(player: Player) -> None:
    player.prepare(info=POPULATION, text="return a", choices=ANSWER, more={"exact": False})


def test_completions_have_a_choice_for_each_text(player: Player, client: httpx.Client) -> None:
    answer = client.post(TEXT, json={**ASK, "n": 3}).json()
    assert [choice["text"] for choice in answer["choices"]] == [text for text, _, _ in ANSWER]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length", "stop"]
    assert [choice["weight"] for choice in answer["choices"]] == [0.5, 0.25, 0.25]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2] and answer["exact"] is False
    assert answer["usage"]["completion_tokens"] == sum(len(player.tokens(text)) for text, _, _ in ANSWER)
    assert player.requests[-1].choices == (3, 3)
    echoed = client.post(TEXT, json={**ASK, "n": 3, "echo": True}).json()
    assert [choice["text"] for choice in echoed["choices"]] == [f"a{text}" for text, _, _ in ANSWER]


def test_chat_has_a_message_for_each_text(player: Player, client: httpx.Client) -> None:
    answer = client.post(CHAT, json={**HELLO, "smc": {"particles": 4}, "n": 2, "best_of": 4}).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == [text for text, _, _ in ANSWER]
    assert all(choice["message"]["role"] == "assistant" for choice in answer["choices"])
    assert answer["choices"][1]["weight"] == 0.25 and player.requests[-1].choices == (2, 4)


def test_reasoning_and_tool_calls_are_separate_for_each_text(thinker: Player, thinking_client: httpx.Client) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    texts = [("<think>one</think>first", "stop", 0.75), (f"<think>two</think>{call}", "stop", 0.25)]
    thinker.prepare(info=POPULATION, text="<think>", choices=texts)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    answer = thinking_client.post(CHAT, json={**HELLO, "tools": tools, "smc": {}, "n": 2}).json()
    first, second = (choice["message"] for choice in answer["choices"])
    assert (first["reasoning_content"], first["content"]) == ("one", "first") and "tool_calls" not in first
    assert second["reasoning_content"] == "two" and second["tool_calls"][0]["function"]["name"] == "f"
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "tool_calls"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_a_stop_string_in_the_common_prefix_leaves_one_choice(player: Player, client: httpx.Client) -> None:
    player.prepare(info=POPULATION, text="return a", more={"exact": False})
    (choice,) = client.post(TEXT, json={**ASK, "n": 3, "stop": "turn"}).json()["choices"]
    assert (choice["text"], choice["weight"]) == ("re", 1.0)


def test_a_stop_string_cuts_each_text(player: Player, client: httpx.Client) -> None:
    choices = client.post(TEXT, json={**ASK, "n": 3, "stop": [" + ", "ass"]}).json()["choices"]
    assert [choice["text"] for choice in choices] == ["return a", "return a - b", "p"]
    assert [choice["stop_reason"] for choice in choices] == [" + ", None, "ass"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length", "stop"]


def test_one_choice_equals_an_ordinary_answer(player: Player, client: httpx.Client) -> None:
    for same in ({}, {"n": 1}, {"best_of": 1}, {"n": 1, "best_of": 0}):
        (choice,) = client.post(TEXT, json={**ASK, **same}).json()["choices"]
        assert choice["text"] == "return a" and "weight" not in choice and player.requests[-1].choices is None
    assert client.post(TEXT, json={**ASK, "best_of": 4}).status_code == 200 and player.requests[-1].choices == (1, 4)


@pytest.mark.parametrize(
    ("path", "more", "param", "error"),
    [
        (TEXT, {"n": 5}, "n", "n must be in 1..best_of, and best_of at most 4, the particles of this server"),
        (TEXT, {"n": 2, "best_of": 5}, "n", "best_of at most 4"),
        (TEXT, {"best_of": 5}, "best_of", "best_of at most 4"),
        (TEXT, {"n": 3, "best_of": 2}, "n", "1..best_of"),
        (TEXT, {"n": 0}, "n", "1..best_of"),
        (TEXT, {"n": 2, "stream": True}, "n", "omit stream"),
        (TEXT, {"n": 2, "smc": None}, "n", 'only 1 is supported, except in mode smc with "smc"'),
        (TEXT, {"n": 2, "smc": {"particles": 9}}, "smc", "particles is 4 on this server, not 9"),
        (CHAT, {"n": 5}, "n", "best_of at most 4"),
        (CHAT, {"n": 2, "stream": True}, "n", "omit stream"),
        (CHAT, {"best_of": 3, "smc": None}, "best_of", "only 1 is supported"),
        (MESSAGES, {"best_of": 3, "max_tokens": 5}, None, "best_of: not supported"),
    ],
    ids=str,
)
def test_invalid_numbers_of_choices_are_refused(
    player: Player, client: httpx.Client, path: str, more: dict[str, Any], param: str | None, error: str
) -> None:
    body = ASK if path == TEXT else {**HELLO, "smc": {}}
    if path == MESSAGES:
        message = client.post(path, json={**body, **more}).json()["error"]["message"]
    else:
        message = refused(client, path, {**body, **more}, param)
    assert error in message and not player.requests


def test_choices_require_mode_smc(player: Player, client: httpx.Client) -> None:
    player.prepare()
    assert "this server runs mode serial; start the server with --mode smc" in refused(
        client, TEXT, {**ASK, "n": 2}, "smc"
    )
