"""Streams: disconnects and keep-alive comments, tested with ASGI messages instead of a network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from msgspec import structs
from starlette.types import Message

from swiftspec.serve.link.engine_client import (
    EngineRequest,
    EngineState,
    GenerationFailedError,
    RequestFrame,
    RequestRejectedError,
)
from tests.support.http import READY, Player, application

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
CHAT = "/v1/chat/completions"


class Caller:
    """One request to an application. `gone` is the time of its disconnect, `sent` the messages that it received."""

    def __init__(self, player: Player, body: dict[str, Any], **options: Any) -> None:
        self._app = application(player, **options)
        self._body = json.dumps(body).encode()
        self._asked = False
        self.disconnected = asyncio.Event()
        self.came = asyncio.Event()
        self.sent: list[Message] = []

    async def run(self) -> None:
        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b"",
            "headers": headers, "asgi": {"spec_version": "2.4"}, "http_version": "1.1", "scheme": "http",
        }  # fmt: skip
        await self._app(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        self.came.set()

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


async def until(player: Player) -> None:
    """Runs until the answer is held back."""
    while not player.holding.is_set():
        await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("rounds", [0, 2])
def test_a_disconnect_ends_the_request(player: Player, stream: bool, rounds: int) -> None:
    """Before the first token (queued, or during the prefill) as well as in the middle."""

    async def leave() -> None:
        player.prepare(hold=rounds)
        caller = Caller(player, {**HELLO, "stream": stream})
        running = asyncio.ensure_future(caller.run())
        await until(player)
        assert not player.closed
        caller.disconnected.set()
        await running
        assert player.closed == player.requests and len(player.requests) == 1
        assert bool(caller.text) == (stream and rounds > 0) and "[DONE]" not in caller.text

    asyncio.run(leave())


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_ends_all_choices(player: Player, stream: bool) -> None:
    async def leave() -> None:
        player.prepare(hold=1, info=structs.replace(READY, max_num_seqs=3))
        caller = Caller(player, {**HELLO, "stream": stream, "n": 3})
        running = asyncio.ensure_future(caller.run())
        await until(player)
        caller.disconnected.set()
        await running
        assert len(player.closed) == len(player.requests) == 3 and "[DONE]" not in caller.text

    asyncio.run(leave())


def test_a_dropped_connection_ends_the_request(player: Player, client: httpx.Client) -> None:
    """The same over a real connection."""
    player.prepare(hold=1)
    with client.stream("POST", CHAT, json={**HELLO, "stream": True}) as answer:
        next(answer.iter_raw())
    assert player.cancelled.wait(10)


def test_a_shutdown_cancels_the_request(player: Player) -> None:
    async def end() -> None:
        player.prepare(hold=1)
        running = asyncio.ensure_future(Caller(player, {**HELLO, "stream": True}).run())
        await until(player)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert player.closed == player.requests

    asyncio.run(end())


@pytest.mark.parametrize(
    ("rounds", "waiting", "comment"), [(0, 1, ": queued"), (0, 0, ": keep-alive"), (2, 1, ": keep")]
)
def test_keep_alive_comments_while_there_is_no_output(player: Player, rounds: int, waiting: int, comment: str) -> None:
    async def wait() -> None:
        player.prepare(hold=rounds, state=EngineState("ready", "", 1, waiting))
        caller = Caller(player, {**HELLO, "stream": True}, keep_alive_s=0.005)
        running = asyncio.ensure_future(caller.run())
        while comment not in caller.text:
            caller.came.clear()
            await caller.came.wait()
        caller.disconnected.set()
        await running
        assert [message["type"] for message in caller.sent].count("http.response.start") == 1
        assert caller.sent[0]["status"] == 200

    asyncio.run(wait())


def test_a_refusal_after_a_comment_is_an_event(player: Player) -> None:
    class Late(Player):
        async def stream_frames(
            self, *requests: EngineRequest
        ) -> AsyncGenerator[tuple[int, RequestFrame], bool | None]:
            await going.wait()
            async for each in super().stream_frames(*requests):
                yield each

    going = asyncio.Event()

    async def play() -> None:
        late = Late(player.codec, raises=RequestRejectedError("waited too long", 429, 1.0))
        caller = Caller(late, {**HELLO, "stream": True}, keep_alive_s=0.005)
        running = asyncio.ensure_future(caller.run())
        await caller.came.wait()
        going.set()
        await running
        assert caller.sent[0]["status"] == 200
        last = caller.text.strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "rate_limit_error"

    asyncio.run(play())


def test_one_chunk_per_round_without_partial_characters(player: Player, client: httpx.Client) -> None:
    """With rounds of one token, characters and stop strings arrive in pieces."""
    text = "é中😀 def STOP it"
    player.prepare(text=text, size=1)
    lines = client.post(CHAT, json={**HELLO, "stream": True, "stop": ["STOP"]}).text.strip().split("\n\n")
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]
    pieces = [chunk["delta"].get("content", "") for chunk in chunks]
    assert "".join(pieces) == "é中😀 def " and "\ufffd" not in "".join(pieces)
    assert pieces[0] == "" and all(pieces[1:-1]), "a round that shows nothing sends nothing"
    assert not any("S" in piece for piece in pieces)
    assert chunks[-1]["stop_reason"] == "STOP" and chunks[-1]["finish_reason"] == "stop"
    assert player.stopped == player.requests and not player.closed, "the request was ended early"


def test_an_answer_that_ends_without_an_error_message(player: Player, client: httpx.Client) -> None:
    player.prepare(text="")
    answer = client.post(CHAT, json=HELLO)
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "engine_error"
    player.prepare(raises=GenerationFailedError("x", "engine_error"))
    assert "x-should-retry" not in client.post(CHAT, json=HELLO).headers
