"""Bytes to a client as they come: server-sent events, comments that keep a connection alive, clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
ENCODER = msgspec.json.Encoder()
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
DONE = b"data: [DONE]\n\n"


def event(data: Any, name: str | None = None) -> bytes:
    """One event with JSON; Anthropic's and OpenAI's newer streams name theirs."""
    head = b"data: " if name is None else b"event: " + name.encode() + b"\ndata: "
    return head + ENCODER.encode(data) + b"\n\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Does the work, and ends it as soon as the client is gone. Raises ClientDisconnect then."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends what `events` gives. The status goes out with the first event, so what is raised before it has a status of
    its own, or with the first comment: one, by `comment`, whenever nothing has come for `every` seconds. `failed` makes
    an event of what is raised later. A client that leaves closes `events` at once."""

    def __init__(
        self, events: AsyncGenerator[bytes], failed: Callable[[Exception], bytes | None],
        comment: Callable[[], bytes], every: float,
    ) -> None:  # fmt: skip
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._events, self._failed, self._comment, self._every = events, failed, comment, every
        self._writing = asyncio.Lock()
        self._started = False
        self._last = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        with contextlib.suppress(ClientDisconnect):
            await unless_gone(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        self._last = time.monotonic()
        alive = asyncio.ensure_future(self._keep_alive(send))
        try:
            async with contextlib.aclosing(self._events) as events:
                async for data in events:
                    await self._write(send, data)
        except Exception as error:
            data = self._failed(error) if self._started else None
            if data is None:
                raise
            await self._write(send, data)
        finally:
            alive.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, data: bytes) -> None:
        async with self._writing:
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._last = time.monotonic()

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await asyncio.sleep(max(self._last + self._every - time.monotonic(), 0.001))
            if time.monotonic() - self._last >= self._every:
                await self._write(send, self._comment())
