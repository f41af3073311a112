"""Answers of each endpoint with many tokens per round equal those with one token per round, as in mode ar: text
and calls keep the order of generation, and an answer ends with the token that ends it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.serve.test_app import CHAT, HELLO, MESSAGES, RESPONSES, TEXT
from tests.support.http import Player

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TEXTS = [
    f"<think>hm</think>Sure. {CALL}Done.",
    f"{CALL}\n{CALL}\n",
    f"a {CALL} b {CALL} c ",
    "Use\n <tool_call> tags ",
    "<think>\nonly reasoning",
]
SIZES = (1, 3, 200)  # tokens per round
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {**HELLO, "tools": [{"type": "function", "function": {"name": "f"}}], "logprobs": True, "top_logprobs": 1},
    RESPONSES: {"input": "hello", "tools": [{"type": "function", "name": "f"}], "top_logprobs": 1},
    MESSAGES: {**HELLO, "tools": [{"name": "f", "input_schema": SCHEMA}]},
    TEXT: {"prompt": "hello", "logprobs": 1},
}
LIMIT = {CHAT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens", TEXT: "max_tokens"}
SINGLE: dict[str, dict[str, Any]] = {
    CHAT: {"parallel_tool_calls": False},
    RESPONSES: {"parallel_tool_calls": False},
    MESSAGES: {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
}
RANDOM = ("id", "call_id", "item_id", "created", "created_at")


def without_ids(value: Any) -> Any:
    """A response without random values, and without the figure of the draft."""
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if not isinstance(value, dict):
        return value
    dropped = (*RANDOM, "accepted_prediction_tokens")
    return {name: without_ids(item) for name, item in value.items() if name not in dropped}


def answer(client: httpx.Client, path: str, max_tokens: int = 150, **body: Any) -> dict[str, Any]:
    response = client.post(path, json={**BODIES[path], LIMIT[path]: max_tokens, **body})
    assert response.status_code == 200, response.text
    return without_ids(response.json())


def stream(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a streamed answer."""
    response = client.post(path, json={**BODIES[path], LIMIT[path]: 150, "stream": True, **body})
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


Part = tuple[str, str]  # kind, and text or name of the tool


def append(parts: list[Part], kind: str, text: str) -> None:
    if parts and parts[-1][0] == kind != "call":
        parts[-1] = kind, parts[-1][1] + text
    else:
        parts.append((kind, text))


def chat_parts(events: list[dict[str, Any]]) -> list[Part]:
    parts: list[Part] = []
    for event in events:
        delta = event["choices"][0]["delta"]
        assert len(delta.keys() - {"role", "reasoning"}) <= 1, "clients read one of them"
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for name, kind in (("reasoning_content", "reasoning"), ("content", "text")):
            if delta.get(name):
                append(parts, kind, delta[name])
        for call in delta.get("tool_calls", ()):
            assert call["index"] == sum(kind == "call" for kind, _ in parts)
            append(parts, "call", call["function"]["name"])
    return parts


def responses_parts(events: list[dict[str, Any]]) -> list[Part]:
    parts: list[Part] = []
    for event in events:
        kind = {"response.reasoning_text.delta": "reasoning", "response.output_text.delta": "text"}.get(event["type"])
        if kind is not None:
            append(parts, kind, event["delta"])
        elif event["type"] == "response.output_item.done" and event["item"]["type"] == "function_call":
            append(parts, "call", event["item"]["name"])
    return parts


def messages_parts(events: list[dict[str, Any]]) -> list[Part]:
    parts: list[Part] = []
    for event in events:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            append(parts, "call", event["content_block"]["name"])
        delta = event.get("delta", {})
        for name, kind in (("thinking", "reasoning"), ("text", "text")):
            if name in delta:
                append(parts, kind, delta[name])
    return parts


def completion_parts(events: list[dict[str, Any]]) -> list[Part]:
    return [("text", "".join(event["choices"][0]["text"] for event in events))]


STREAMED = {CHAT: chat_parts, RESPONSES: responses_parts, MESSAGES: messages_parts, TEXT: completion_parts}
ORDERS: list[list[Part]] = [
    [("reasoning", "hm"), ("text", "Sure."), ("call", "f"), ("text", "Done.")],
    [("call", "f"), ("call", "f")],
    [("text", "a"), ("call", "f"), ("text", " b"), ("call", "f"), ("text", " c ")],
    [("text", "Use\n <tool_call> tags ")],
    [("reasoning", "only reasoning")],
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, TEXT])
def test_rounds_do_not_change_an_answer(thinker: Player, thinking_client: httpx.Client, path: str) -> None:
    for text, order in zip(TEXTS, ORDERS):
        answers = []
        for size in SIZES:
            thinker.prepare(text=text, size=size)
            answers.append(answer(thinking_client, path))
            expected = [("text", text)] if path == TEXT else order
            assert STREAMED[path](stream(thinking_client, path)) == expected, (text, size)
        assert answers[1:] == answers[:1] * (len(SIZES) - 1), text


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_a_complete_answer_has_the_order_of_generation(
    thinker: Player, thinking_client: httpx.Client, path: str
) -> None:
    thinker.prepare(text=TEXTS[0], size=200)
    whole = answer(thinking_client, path)
    if path == RESPONSES:
        kinds = [item["type"] for item in whole["output"]]
        assert kinds == ["reasoning", "message", "function_call", "message"]
        texts = [item["content"][0]["text"] for item in whole["output"] if item["type"] == "message"]
    else:
        assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "text"]
        texts = [block["text"] for block in whole["content"] if block["type"] == "text"]
    assert texts == ["Sure.", "Done."]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_single_call_ends_the_answer_with_its_last_token(
    thinker: Player, thinking_client: httpx.Client, path: str
) -> None:
    """Also if the limit is reached in the same round, or by the same token."""
    text = f"a {CALL}"
    end = len(thinker.tokens(text))
    for limit in (end - 1, end, end + 2, 150):
        answers = []
        for size in SIZES:
            thinker.prepare(text=f"{text} b {CALL} c", size=size)
            answers.append(answer(thinking_client, path, limit, **SINGLE[path]))
        assert answers[1:] == answers[:1] * (len(SIZES) - 1), limit
        used = answers[0]["usage"]
        assert (used.get("completion_tokens") or used.get("output_tokens")) == min(limit, end)
        reason = answers[0].get("stop_reason") or answers[0].get("status") or answers[0]["choices"][0]["finish_reason"]
        cut, complete = {
            CHAT: ("length", "tool_calls"),
            RESPONSES: ("incomplete", "completed"),
            MESSAGES: ("max_tokens", "tool_use"),
        }[path]
        assert reason == (cut if limit < end else complete)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_forced_call_that_is_cut_shows_no_markup(thinker: Player, thinking_client: httpx.Client, path: str) -> None:
    forced: dict[str, Any] = {"tool_choice": {"type": "any"} if path == MESSAGES else "required"}
    chosen: dict[str, Any] = {  # a call instead of an answer in this format
        CHAT: {"response_format": {"type": "json_object"}},
        RESPONSES: {"text": {"format": {"type": "json_object"}}},
        MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    }[path]
    for choice, limit in ((forced, 1), (forced, len(thinker.tokens(CALL)) - 15), (chosen, 9)):
        in_arguments = path == CHAT and limit > 9
        for size in (1, 200):
            thinker.prepare(text=CALL, size=size)
            whole = answer(thinking_client, path, limit, **choice)
            assert "tool_call>" not in json.dumps(without_logprobs(whole))
            events = stream(thinking_client, path, **{LIMIT[path]: limit}, **choice)
            assert STREAMED[path](events) == [("call", "f")] * in_arguments
            assert "length" in str(whole) or "incomplete" in str(whole) or "max_tokens" in str(whole)
            if in_arguments:  # as OpenAI returns it
                (call,) = whole["choices"][0]["message"]["tool_calls"]
                assert CALL.count(call["function"]["arguments"]) == 1
            else:
                assert '"name"' not in str(whole)


def test_a_forced_call_that_a_stop_string_cuts_is_dropped(thinker: Player, thinking_client: httpx.Client) -> None:
    """Its arguments are no JSON, and the finish reason "stop" does not say so."""
    thinker.prepare(text=CALL, size=1)
    choice = answer(thinking_client, CHAT, tool_choice="required", stop=['"a"'])["choices"][0]
    assert choice["finish_reason"] == "stop" and not choice["message"].get("tool_calls")


def without_logprobs(value: dict[str, Any]) -> dict[str, Any]:
    """A response of chat completions without the tokens of its log-probabilities."""
    choices = [
        {name: item for name, item in choice.items() if name != "logprobs"} for choice in value.get("choices", ())
    ]
    return {name: item for name, item in value.items() if name != "tools"} | {"choices": choices}


def test_log_probabilities_of_each_message_are_those_of_its_tokens(
    thinker: Player, thinking_client: httpx.Client
) -> None:
    thinker.prepare(text=TEXTS[0], size=200)
    items = [item for item in answer(thinking_client, RESPONSES)["output"] if item["type"] == "message"]
    spelled = ["".join(token["token"] for token in item["content"][0]["logprobs"]) for item in items]
    assert spelled[0] == "Sure." and spelled[1] == "Done."
    events = stream(thinking_client, CHAT)
    tokens = [item for event in events for item in (event["choices"][0]["logprobs"] or {"content": ()})["content"]]
    assert "".join(token["token"] for token in tokens) == TEXTS[0]
