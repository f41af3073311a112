"""Rendered prompts and sampling parameters are those of the request."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.http import Player, changed_fields

HELLO = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": HELLO},
        {"messages": HELLO, "add_generation_prompt": False, "truncate_prompt_tokens": 5},
        {"messages": [*HELLO, {"role": "assistant", "content": "a"}], "continue_final_message": True,
         "add_generation_prompt": False, "stream": True, "temperature": 0.5},
    ],
)  # fmt: skip
def test_conversations(player: Player, client: httpx.Client, body: dict[str, Any]) -> None:
    rendered = client.post("/v1/chat/completions/render", json=body).json()
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert rendered["token_ids"] == player.requests[0].prompt and rendered["request_id"].startswith("chatcmpl-")
    assert rendered["stream"] == body.get("stream", False)
    assert rendered["sampling_params"].get("temperature") == body.get("temperature")


@pytest.mark.parametrize(
    "body", [{"prompt": "hello"}, {"prompt": ["a", "bc"], "truncate_prompt_tokens": 1}, {"prompt": [5, 6, 7]}]
)
def test_texts(player: Player, client: httpx.Client, body: dict[str, Any]) -> None:
    rendered = client.post("/v1/completions/render", json=body).json()
    assert client.post("/v1/completions", json=body).status_code == 200
    assert [each["token_ids"] for each in rendered] == [request.prompt for request in player.requests]


def test_sampling_parameters(player: Player, client: httpx.Client) -> None:
    body = {"prompt": ["a", "bc"], "seed": 5, "top_p": 0.5, "max_tokens": 3, "stop": "x", "request_id": "abc"}
    rendered = client.post("/v1/completions/render", json=body).json()
    assert [each["request_id"] for each in rendered] == ["cmpl-abc-0", "cmpl-abc-1"]
    client.post("/v1/completions", json=body)
    assert rendered[0]["sampling_params"] == {**changed_fields(player.requests[0].sampling), "stop": ["x"]}
    assert rendered[0]["stream_options"] is None
    body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
    (rendered,) = client.post("/v1/completions/render", json=body, headers={"x-request-id": "own"}).json()
    assert rendered["request_id"] == "cmpl-own" and rendered["stream_options"]["include_usage"] is True
    assert rendered["sampling_params"]["seed"] is None


def test_invalid_requests(client: httpx.Client) -> None:
    for path, body in (
        ("/v1/completions/render", {"prompt": ""}), ("/v1/completions/render", {"prompt": "a", "model": "unknown"}),
        ("/v1/completions/render", {"prompt": "a", "stop_token_ids": [10**6]}),
        ("/v1/chat/completions/render", {"messages": []}), ("/v1/chat/completions/render", {"prompt": "a"}),
    ):  # fmt: skip
        assert client.post(path, json=body).status_code in (400, 404)
