"""Server-sent events: streaming responses with keep-alive comments, and cancellation when a client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
Write = Callable[[bytes], Awaitable[None]]  # sends encoded events
ENCODER = msgspec.json.Encoder()
SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
DONE_EVENT = b"data: [DONE]\n\n"
EVENT_END = b"\n\n"  # JSON data has no line breaks


def sse_event(data: Any, name: str | None = None) -> bytes:
    """Encodes one event with JSON data. `name`: event type, used by Anthropic's Messages API and OpenAI's Responses
    API; None omits it."""
    head = b"data: " if name is None else b"event: " + name.encode() + b"\ndata: "
    return head + ENCODER.encode(data) + b"\n\n"


async def cancel_on_disconnect(receive: Receive, coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine and cancels it when the client disconnects. Raises ClientDisconnect in that case."""
    task, disconnect = asyncio.ensure_future(coroutine), asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A streaming response of server-sent events.

    Status 200 is sent with the first event or comment. An exception before that propagates, so that the response gets
    an error status; `on_error` converts a later exception to an event.

    `produce`: writes the events, encoded, with the function that it gets. It is cancelled when the client disconnects.
    `on_error`: returns an encoded event for an exception, or None to let the exception propagate.
    `comment`: returns an encoded comment, which is sent after `keep_alive_s` seconds without output.
    """

    def __init__(
        self,
        produce: Callable[[Write], Awaitable[None]],
        on_error: Callable[[Exception], bytes | None],
        comment: Callable[[], bytes],
        keep_alive_s: float,
    ) -> None:
        super().__init__(headers=SSE_HEADERS)
        del self.headers["content-length"]
        self._produce, self._on_error, self._comment, self._keep_alive_s = produce, on_error, comment, keep_alive_s
        self._writing = asyncio.Lock()
        self._started = False
        self._last_write = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response."""
        with contextlib.suppress(ClientDisconnect):
            await cancel_on_disconnect(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        self._last_write = time.monotonic()
        keep_alive = asyncio.ensure_future(self._keep_alive(send))
        try:
            await self._produce(partial(self._write, send))
        except Exception as error:
            data = self._on_error(error) if self._started else None
            if data is None:
                raise
            await self._write(send, data)
        finally:
            keep_alive.cancel()
        if not self._started:  # a stream without events
            await self._write(send, b"")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, data: bytes) -> None:
        async with self._writing:
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._last_write = time.monotonic()

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await asyncio.sleep(max(self._last_write + self._keep_alive_s - time.monotonic(), 0.001))
            if time.monotonic() - self._last_write >= self._keep_alive_s:
                await self._write(send, self._comment())
