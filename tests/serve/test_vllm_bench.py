"""Requests of `vllm bench serve`, and what it reads from the responses.

Its backends `openai` and `openai-chat` send the fields below; sampling flags such as --temperature add fields.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.support.http import Player

COMMON: dict[str, Any] = {"model": "toy", "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
COMPLETIONS = {**COMMON, "repetition_penalty": 1.0, "max_tokens": 9, "logprobs": None, "temperature": 0.0}
CHAT = {**COMMON, "max_completion_tokens": 9, "temperature": 0.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1}
CONTENT = [{"type": "text", "text": "def"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**COMPLETIONS, "prompt": "def"}),
        ("/v1/completions", {**COMPLETIONS, "prompt": [274, 5]}),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": CONTENT}]}),
    ],
    ids=["text", "token ids", "chat"],
)
def test_requests_and_what_is_read(client: httpx.Client, player: Player, path: str, body: dict[str, Any]) -> None:
    response = client.post(path, json=body, headers={"x-request-id": "bench-0"})
    assert response.status_code == 200 and response.headers["x-request-id"] == "bench-0"
    events = [event for event in response.text.split("\n\n") if event and not event.startswith(":")]
    assert all(event.startswith("data: ") for event in events) and events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    # It reads usage from a chunk without choices, and takes the times of all other chunks as those of output.
    assert [bool(chunk["choices"]) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    texts = [_text(chunk["choices"][0]) for chunk in chunks[:-1]]
    sent = player.requests[0]
    assert "".join(texts) == player.codec.decode(player.tokens()[:9])
    assert chunks[-1]["usage"]["completion_tokens"] == 9
    assert chunks[-1]["usage"]["prompt_tokens"] == len(sent.prompt)
    assert (sent.sampling.ignore_eos, sent.sampling.max_tokens, sent.sampling.temperature) == (True, 9, 0)
    expected = {name: body[name] for name in ("top_p", "top_k", "min_p", "repetition_penalty") if name in body}
    assert sent.sampling.values_of(expected) == expected


def _text(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["delta"].get("content") or ""


def test_it_finds_the_model(client: httpx.Client) -> None:
    first = client.get("/v1/models").json()["data"][0]
    assert first["id"] == first["root"] == "toy"
