"""The Responses API: stored, chained and background responses, states of items, and errors in streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import httpx
import pytest

from swiftspec.serve.http.api import background
from swiftspec.serve.http.engine_link.engine_client import EngineRequest, GenerationFailedError, RequestRejectedError
from swiftspec.serve.http.middleware.security import SecurityMiddleware
from tests.support.http import Player, application

RESPONSES = "/v1/responses"
TEXT = "def add(a, b):\n    return a + b\n"
Scene = Callable[[httpx.AsyncClient], Awaitable[None]]


class SuspendingPlayer(Player):
    """Yields to the event loop before each frame, as an engine in another process does."""

    async def stream_frames(self, *requests: EngineRequest) -> AsyncGenerator[Any, bool | None]:
        stop = None
        async with aclosing(super().stream_frames(*requests)) as frames:
            while True:
                await asyncio.sleep(0)
                try:
                    frame = await frames.asend(stop)
                except StopAsyncIteration:
                    return
                stop = yield frame


def run(app: Any, scene: Scene) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            await asyncio.wait_for(scene(client), 20)

    asyncio.run(main())


async def ended(client: httpx.AsyncClient, name: str) -> dict[str, Any]:
    """The response after its generation has ended."""
    while True:
        response = (await client.get(f"{RESPONSES}/{name}")).json()
        if response["status"] not in ("queued", "in_progress"):
            return response
        await asyncio.sleep(0)  # requests inside one process do not suspend


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
            client.delete(f"{RESPONSES}/{name}"), client.post(f"{RESPONSES}/{name}/cancel"),
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


def test_errors_of_new_items_have_their_index(player: Player, client: httpx.Client) -> None:
    first = client.post(RESPONSES, json={"input": "one"}).json()
    body = {"input": [{"role": "user", "content": "x"}, {"type": "odd"}], "previous_response_id": first["id"]}
    assert client.post(RESPONSES, json=body).json()["error"]["param"] == "input.1"


def test_an_unknown_previous_response_is_named(player: Player, client: httpx.Client) -> None:
    for path in (RESPONSES, f"{RESPONSES}/input_tokens"):
        answer = client.post(path, json={"input": "x", "previous_response_id": "resp_x"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "previous_response_not_found")


def test_without_a_store(plain_player: Player) -> None:
    plain_player.prepare()

    async def scene(client: httpx.AsyncClient) -> None:
        response = (await client.post(RESPONSES, json={"input": "a", "store": True})).json()
        assert response["store"] is False
        assert (await client.get(f"{RESPONSES}/{response['id']}")).status_code == 404
        for fields in ({"previous_response_id": response["id"]}, {"background": True}):
            refused = await client.post(RESPONSES, json={"input": "a", **fields})
            assert refused.status_code == 400 and "--response-store-memory" in refused.json()["error"]["message"]

    run(application(plain_player, response_store_bytes=0), scene)


def test_a_response_belongs_to_its_key(plain_player: Player) -> None:
    plain_player.prepare()

    async def scene(client: httpx.AsyncClient) -> None:
        one, two = {"Authorization": "Bearer one"}, {"x-api-key": "two"}
        created = (await client.post(RESPONSES, json={"input": "a"}, headers=one)).json()
        path = f"{RESPONSES}/{created['id']}"
        assert (await client.get(path, headers={"x-api-key": "one"})).status_code == 200
        for answer in (
            await client.get(path, headers=two), await client.delete(path, headers=two),
            await client.post(f"{path}/cancel", headers=two),
        ):  # fmt: skip
            assert answer.status_code == 404
        body = {"input": "a", "previous_response_id": created["id"]}
        assert (await client.post(RESPONSES, json=body, headers=two)).status_code == 400
        assert (await client.post(RESPONSES, json=body, headers=one)).status_code == 200

    run(SecurityMiddleware(application(plain_player), ["one", "two"]), scene)


def test_a_background_response(plain_player: Player) -> None:
    player = SuspendingPlayer(plain_player.codec)

    async def scene(client: httpx.AsyncClient) -> None:
        queued = (await client.post(RESPONSES, json={"input": "a", "background": True})).json()
        assert (queued["status"], queued["background"], queued["output"]) == ("queued", True, [])
        early = await client.post(RESPONSES, json={"input": "b", "previous_response_id": queued["id"]})
        assert early.status_code == 400 and "wait until it ends" in early.json()["error"]["message"]
        response = await ended(client, queued["id"])
        assert response["status"] == "completed" and response["output"][0]["content"][0]["text"] == TEXT
        cancelled = (await client.post(f"{RESPONSES}/{queued['id']}/cancel")).json()
        assert cancelled == response, "a response that has ended does not change"
        streamed = await client.get(f"{RESPONSES}/{queued['id']}", params={"stream": True})
        assert streamed.status_code == 400 and streamed.json()["error"]["param"] == "stream"

    run(application(player), scene)


def test_a_background_response_is_cancelled(player: Player, client: httpx.Client) -> None:
    player.prepare(hold=2)
    queued = client.post(RESPONSES, json={"input": "a", "background": True}).json()
    assert player.holding.wait(10)
    running = client.get(f"{RESPONSES}/{queued['id']}").json()
    assert (running["status"], running["output"]) == ("in_progress", [])
    cancelled = client.post(f"{RESPONSES}/{queued['id']}/cancel").json()
    assert player.cancelled.is_set() and player.closed == player.requests
    assert cancelled["status"] == "cancelled" and cancelled["output"][0]["status"] == "incomplete"
    assert TEXT.startswith(cancelled["output"][0]["content"][0]["text"])
    assert client.get(f"{RESPONSES}/{queued['id']}").json() == cancelled
    player.prepare(hold=0)
    deleted = client.post(RESPONSES, json={"input": "a", "background": True}).json()
    assert client.delete(f"{RESPONSES}/{deleted['id']}").status_code == 200 and player.cancelled.is_set()
    assert client.get(f"{RESPONSES}/{deleted['id']}").status_code == 404


def test_a_background_stream_is_resumed(player: Player, client: httpx.Client) -> None:
    """The generation continues after the client leaves; later streams start after any event."""
    player.prepare(hold=2)
    with client.stream("POST", RESPONSES, json={"input": "a", "background": True, "stream": True}) as answer:
        name = json.loads(next(line for line in answer.iter_lines() if line.startswith("data: "))[6:])["response"]["id"]
    assert player.holding.wait(10) and not player.cancelled.is_set()
    assert client.get(f"{RESPONSES}/{name}").json()["status"] == "in_progress"
    client.post(f"{RESPONSES}/{name}/cancel")
    events = sse(client.get(f"{RESPONSES}/{name}", params={"stream": True}).text)
    assert [name for name, _ in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert events[-1][0] == "response.output_item.done" and events[-1][1]["item"]["status"] == "incomplete"
    assert sse(client.get(f"{RESPONSES}/{name}", params={"stream": True, "starting_after": 4}).text) == events[5:]
    beyond = client.get(f"{RESPONSES}/{name}", params={"stream": True, "starting_after": len(events)})
    assert beyond.status_code == 200 and beyond.text == ""
    player.prepare()
    body = {"input": "a", "background": True, "stream": True}
    assert sse(client.post(RESPONSES, json=body).text)[-1][0] == "response.completed"


def test_cancellations_at_any_time_agree(plain_player: Player) -> None:
    """Two cancellations at once, before, during and after the generation: both return the last state."""
    player = SuspendingPlayer(plain_player.codec)

    async def scene(client: httpx.AsyncClient) -> None:
        statuses = list[str]()
        for steps in range(10):
            queued = (await client.post(RESPONSES, json={"input": "a", "background": True})).json()
            for _ in range(steps):
                await asyncio.sleep(0)
            path = f"{RESPONSES}/{queued['id']}"
            one, two = await asyncio.gather(client.post(f"{path}/cancel"), client.post(f"{path}/cancel"))
            assert one.json() == two.json() == (await client.get(path)).json()
            statuses.append(one.json()["status"])
        assert statuses == sorted(statuses) and set(statuses) == {"cancelled", "completed"}
        assert len(player.closed) == statuses.count("cancelled")

    run(application(player), scene)


def test_background_requests_that_are_refused(player: Player, client: httpx.Client) -> None:
    body = {"input": "a", "background": True}
    refused = client.post(RESPONSES, json={**body, "store": False})
    assert refused.status_code == 400 and "only be used when `store` is true" in refused.json()["error"]["message"]
    player.prepare(raises=RequestRejectedError("the queue is full", 429, 1.5))
    refused = client.post(RESPONSES, json=body)
    assert refused.status_code == 429 and refused.headers["retry-after"] == "2"
    created = client.post(RESPONSES, json={"input": "a", "store": False}).json()
    assert client.post(f"{RESPONSES}/{created.get('id')}/cancel").status_code == 404
    player.prepare()
    created = client.post(RESPONSES, json={"input": "a"}).json()
    refused = client.post(f"{RESPONSES}/{created['id']}/cancel")
    assert refused.status_code == 400 and "Cannot cancel a synchronous response." in refused.text


def test_the_number_of_background_responses_is_limited(
    player: Player, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "MAX_BACKGROUND_RESPONSES", 1)
    player.prepare(hold=0)
    running = client.post(RESPONSES, json={"input": "a", "background": True}).json()
    refused = client.post(RESPONSES, json={"input": "a", "background": True})
    assert refused.status_code == 429 and "1 responses run in the background" in refused.json()["error"]["message"]
    client.post(f"{RESPONSES}/{running['id']}/cancel")
    player.prepare()
    assert client.post(RESPONSES, json={"input": "a", "background": True}).status_code == 200


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GenerationFailedError("rank 1 is gone", "engine_error"), "server_error"),
        (RequestRejectedError("waited too long", 429, 1.0), "rate_limit_exceeded"),
        (ZeroDivisionError("a bug"), "server_error"),
    ],
)
def test_a_background_response_fails(plain_player: Player, error: Exception, code: str) -> None:
    player = SuspendingPlayer(plain_player.codec, raises=error, after=1)

    async def scene(client: httpx.AsyncClient) -> None:
        queued = (await client.post(RESPONSES, json={"input": "a", "background": True})).json()
        response = await ended(client, queued["id"])
        assert (response["status"], response["error"]["code"]) == ("failed", code)
        assert "a bug" not in response["error"]["message"] and response["output"][0]["status"] == "incomplete"

    run(application(player), scene)


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
