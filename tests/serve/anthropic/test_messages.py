"""Details of Anthropic's Messages API: fields of messages and events, formats, thinking, and errors."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.support.http import Player

MESSAGES = "/v1/messages"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 100}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
MESSAGE_FIELDS = {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}


def test_messages_and_events_have_only_fields_of_the_api(player: Player, client: httpx.Client) -> None:
    assert set(client.post(MESSAGES, json=HELLO).json()) == MESSAGE_FIELDS
    lines = client.post(MESSAGES, json={**HELLO, "stream": True}).text.strip().split("\n\n")
    events = {(event := json.loads(line.partition("data: ")[2]))["type"]: event for line in lines}
    assert set(events["message_start"]["message"]) == MESSAGE_FIELDS
    assert set(events["message_delta"]) == {"type", "delta", "usage"}
    assert set(events["message_stop"]) == {"type"}


@pytest.mark.parametrize("fields", [{"output_format": FORMAT}, {"output_config": {"format": FORMAT}}])
def test_both_names_of_the_format(player: Player, client: httpx.Client, fields: dict[str, Any]) -> None:
    assert client.post(MESSAGES, json={**HELLO, **fields}).status_code == 200
    schema = json.loads(player.grammar)["grammars"][0]["json_schema"]
    assert {name: value for name, value in schema.items() if name != "x-guidance"} == SCHEMA


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"output_format": FORMAT, "output_config": {"format": FORMAT}}, "output_format: the earlier name of "),
        ({"output_format": {"type": "json_schema", "schema": {"type": 7}}}, "output_format: "),
        ({"mcp_servers": [{"type": "url", "url": "https://example.com"}]}, "mcp_servers: not supported"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens: input should be greater"),
    ],
)
def test_fields_that_are_refused(player: Player, client: httpx.Client, fields: dict[str, Any], message: str) -> None:
    answer = client.post(MESSAGES, json={**HELLO, **fields})
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(message)
    assert answer.json()["type"] == "error" and not player.requests


def test_values_that_change_nothing_are_accepted(player: Player, client: httpx.Client) -> None:
    fields = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "mcp_servers": []}
    assert client.post(MESSAGES, json={**HELLO, **fields}).status_code == 200


def test_thinking_of_earlier_turns_is_left_to_the_template(thinker: Player, thinking_client: httpx.Client) -> None:
    """HERMES does not render it; redacted thinking has no text."""
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "fine"},
    ]  # fmt: skip
    counts = []
    for more, content in ({"max_tokens": 64, "stream": True}, blocks), ({}, "fine"):
        turns = [*HELLO["messages"], {"role": "assistant", "content": content}, {"role": "user", "content": "more"}]
        assert thinking_client.post(MESSAGES, json={**HELLO, "messages": turns}).status_code == 200
        body = {"messages": turns, **more}
        counts.append(thinking_client.post(f"{MESSAGES}/count_tokens", json=body).json()["input_tokens"])
    assert counts[0] == counts[1] == len(thinker.requests[-1].prompt)


def test_models_have_errors_in_the_schema_of_the_client(client: httpx.Client) -> None:
    answer = client.get("/v1/models/none", headers={"anthropic-version": "2023-06-01"})
    assert answer.status_code == 404 and answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "not_found_error"
    assert client.get("/v1/models/none").json()["error"]["code"] == "model_not_found"
