"""The Responses API: stored and chained responses, states of items, and errors in streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from swiftspec.serve.link.engine_client import GenerationFailedError
from swiftspec.serve.middleware.security import SecurityMiddleware
from tests.support.http import Player, application

RESPONSES = "/v1/responses"
TEXT = "def add(a, b):\n    return a + b\n"
Scene = Callable[[httpx.AsyncClient], Awaitable[None]]


def run(app: Any, scene: Scene) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            await asyncio.wait_for(scene(client), 20)

    asyncio.run(main())


def prompt_of(player: Player) -> str:
    return player.codec.token_text(player.requests[-1].prompt)


def sse(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and data of each event."""
    pairs = [event.split("\ndata: ") for event in text.strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data)) for name, data in pairs]


def test_a_response_is_stored_unless_the_request_forbids_it(player: Player, client: httpx.Client) -> None:
    created = client.post(RESPONSES, json={"input": "hi"}).json()
    assert created["store"] is True
    assert client.get(f"{RESPONSES}/{created['id']}").json() == created
    streamed = sse(client.post(RESPONSES, json={"input": "hi", "stream": True}).text)[-1][1]["response"]
    assert client.get(f"{RESPONSES}/{streamed['id']}").json() == streamed
    assert client.delete(f"{RESPONSES}/{created['id']}").json() == {
        "id": created["id"], "object": "response", "deleted": True,
    }  # fmt: skip
    unstored = client.post(RESPONSES, json={"input": "hi", "store": False}).json()
    assert unstored["store"] is False
    for name in (created["id"], unstored["id"], "resp_x"):
        for answer in (
            client.get(f"{RESPONSES}/{name}"), client.get(f"{RESPONSES}/{name}/input_items"),
            client.delete(f"{RESPONSES}/{name}"),
        ):  # fmt: skip
            assert answer.status_code == 404
            assert f"Response with id '{name}' not found" in answer.json()["error"]["message"]


def test_a_previous_response_precedes_the_input_without_its_instructions(
    thinker: Player, thinking_client: httpx.Client
) -> None:
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    thinker.prepare(text='<think>hm</think>Ok.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    body = {"input": "one", "instructions": "be brief", "tools": tools}
    first = thinking_client.post(RESPONSES, json=body).json()
    thinker.prepare(text="two")
    output = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "2"}
    body = {"input": [output], "previous_response_id": first["id"], "top_logprobs": 1}
    second = thinking_client.post(RESPONSES, json=body).json()
    assert second["previous_response_id"] == first["id"]
    assert prompt_of(thinker) == (
        '<|user|>one<|end|><|bot|>Ok.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|end|>'
        "<|bot|>2<|end|><|bot|>"
    )
    third = thinking_client.post(RESPONSES, json={"input": "x", "previous_response_id": second["id"]}).json()
    assert prompt_of(thinker).endswith("<|bot|>2<|end|><|bot|>two<|end|><|user|>x<|end|><|bot|>")
    body = {"input": "x", "previous_response_id": second["id"]}
    count = thinking_client.post(f"{RESPONSES}/input_tokens", json=body).json()
    assert count == {"object": "response.input_tokens", "input_tokens": third["usage"]["input_tokens"]}
    path = f"{RESPONSES}/{third['id']}/input_items"
    listed = thinking_client.get(path, params={"order": "asc"}).json()
    kinds = ["message", "reasoning", "message", "function_call", "function_call_output", "message", "message"]
    assert [item["type"] for item in listed["data"]] == kinds and listed["has_more"] is False
    assert listed["data"][1:4] == [
        {**item, "content": [{k: v for k, v in part.items() if k != "logprobs"} for part in item["content"]]}
        if "content" in item else item
        for item in first["output"]
    ]  # fmt: skip
    last_two = thinking_client.get(path, params={"limit": 2}).json()
    assert last_two["data"] == listed["data"][:-3:-1] and last_two["has_more"] is True
    assert (last_two["first_id"], last_two["last_id"]) == (listed["data"][-1]["id"], listed["data"][-2]["id"])
    rest = thinking_client.get(path, params={"after": last_two["last_id"]}).json()
    assert rest["data"] == listed["data"][-3::-1]
    for params, param in (({"limit": 0}, "limit"), ({"order": "up"}, "order"), ({"after": "x"}, "after")):
        refused = thinking_client.get(path, params=params)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param


def test_a_background_response_is_refused(player: Player, client: httpx.Client) -> None:
    refused = client.post(RESPONSES, json={"input": "a", "background": True})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "background"
    assert client.post(RESPONSES, json={"input": "a", "background": False}).json()["background"] is False


def test_errors_of_new_items_have_their_index(player: Player, client: httpx.Client) -> None:
    first = client.post(RESPONSES, json={"input": "one"}).json()
    body = {"input": [{"role": "user", "content": "x"}, {"type": "odd"}], "previous_response_id": first["id"]}
    assert client.post(RESPONSES, json=body).json()["error"]["param"] == "input.1"


def test_an_unknown_previous_response_is_named(player: Player, client: httpx.Client) -> None:
    for path in (RESPONSES, f"{RESPONSES}/input_tokens"):
        answer = client.post(path, json={"input": "x", "previous_response_id": "resp_x"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "previous_response_not_found")


def test_a_response_belongs_to_its_key(plain_player: Player) -> None:
    plain_player.prepare()

    async def scene(client: httpx.AsyncClient) -> None:
        one, two = {"Authorization": "Bearer one"}, {"x-api-key": "two"}
        created = (await client.post(RESPONSES, json={"input": "a"}, headers=one)).json()
        path = f"{RESPONSES}/{created['id']}"
        assert (await client.get(path, headers={"x-api-key": "one"})).status_code == 200
        for answer in (
            await client.get(path, headers=two), await client.delete(path, headers=two),
        ):  # fmt: skip
            assert answer.status_code == 404
        body = {"input": "a", "previous_response_id": created["id"]}
        assert (await client.post(RESPONSES, json=body, headers=two)).status_code == 400
        assert (await client.post(RESPONSES, json=body, headers=one)).status_code == 200

    run(SecurityMiddleware(application(plain_player), ["one", "two"]), scene)


@pytest.mark.parametrize(("limit", "status"), [(2, "incomplete"), (100, "completed")])
def test_an_item_that_is_cut_is_incomplete(player: Player, client: httpx.Client, limit: int, status: str) -> None:
    body = {"input": "a", "max_output_tokens": limit}
    response = client.post(RESPONSES, json=body).json()
    assert response["status"] == response["output"][0]["status"] == status
    events = sse(client.post(RESPONSES, json={**body, "stream": True}).text)
    name, last = events[-1]
    assert name == f"response.{status}" and last["response"]["output"][0]["status"] == status
    assert [data["item"]["status"] for name, data in events if name == "response.output_item.done"] == [status]


def test_a_stream_that_fails_ends_with_an_error_and_the_failed_response(player: Player, client: httpx.Client) -> None:
    player.prepare(raises=GenerationFailedError("too slow", "timeout"), after=2)
    events = sse(client.post(RESPONSES, json={"input": "a", "stream": True}).text)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    (name, error), (last_name, last) = events[-2:]
    assert name == error["type"] == "error" and last_name == last["type"] == "response.failed"
    assert (error["code"], error["message"], error["param"]) == ("timeout", "too slow", None)
    assert error["error"] == {"message": "too slow", "type": "timeout", "param": None, "code": None}
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "too slow"}
    assert client.get(f"{RESPONSES}/{last['response']['id']}").json() == last["response"]
