"""What happens in every round, for whoever watches: /v1/spec/events. docs/reference/trace.md has the lines.

Rank 0 records while there is a listener. Its lines go into one ring, which all listeners read at their own speed: what
has left the ring by the time that one comes for it, that one has missed and is told so.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.responses import Response

from swiftspec.serve.http.engine_link.frames import Event, Ready
from swiftspec.serve.http.sse import ENCODER, EventStream
from swiftspec.serve.text.codec import TextCodec

MOST = 10_000  # lines that the ring holds
MOST_BYTES = 32 << 20  # and bytes of them
MANY = 200  # tokens that are made text of beside the event loop
FRAME = 0.016  # seconds: a page draws no more often
TOGETHER = 64  # lines that are sent at once
HELLO = b"retry: 1000\n\n"  # milliseconds after which a browser comes back
ALIVE = b": still here\n\n"


@dataclass(frozen=True, slots=True)
class Told:
    """A line, and its place among all that were told; 0: it has none, as it is told to each listener first."""

    number: int
    event: Event


class Events:
    """The ring. `watch` tells rank 0 whether anybody listens."""

    def __init__(self, watch: Callable[[bool], None], most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._watch, self._most, self._most_bytes = watch, most, most_bytes
        self._ring: deque[Told] = deque()
        self._bytes, self._last = 0, 0  # in the ring; the number given last
        self._head: Event | None = None
        self._listeners, self._over = 0, False
        self._more = asyncio.Event()  # set once there is more; each listener then waits for the next one

    def begin(self, ready: Ready) -> None:
        """Rank 0 takes requests, for the first time or again: from now on its requests count from 1."""
        self._head = Event("head", ENCODER.encode(ready.head), [])
        self.put(self._head)
        if self._listeners:
            self._watch(True)

    def put(self, *events: Event) -> None:
        """The next lines."""
        for event in events:
            self._last += 1
            self._ring.append(Told(self._last, event))
            self._bytes += len(event.line)
        while self._ring and (len(self._ring) > self._most or self._bytes > self._most_bytes):
            self._bytes -= len(self._ring.popleft().event.line)
        self._wake()

    def close(self) -> None:
        """Ends all streams."""
        self._over = True
        self._wake()

    async def follow(self, after: int | None) -> AsyncGenerator[list[Told | int]]:
        """The head, then the lines after the one with that number, as they come; None: from now on. A number stands for
        so many lines that this listener has missed. Close it."""
        at = self._last if after is None else after if after <= self._last else 0
        self._listeners += 1
        if self._listeners == 1:
            self._watch(True)
        try:
            if self._head is not None:
                yield [Told(0, self._head)]
            while not self._over:
                if at == self._last:
                    await self._more.wait()
                    await asyncio.sleep(FRAME)  # what comes until then goes with it
                    continue
                first = self._last - len(self._ring) + 1
                missed = [first - 1 - at] if at + 1 < first else []
                at = max(at, first - 1)
                some = list(islice(self._ring, at + 1 - first, at + 1 - first + TOGETHER))
                at += len(some)
                yield [*missed, *some]
        finally:
            self._listeners -= 1
            if self._listeners == 0:
                self._watch(False)

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()


class Speller:
    """The texts of tokens, each made once, and for one listener told once."""

    def __init__(self, codec: Callable[[], TextCodec | None]) -> None:
        self._codec, self._texts = codec, dict[int, str]()

    async def line(self, event: Event, told: set[int]) -> bytes:
        """The line with the texts of those of its tokens that are not yet among `told`."""
        codec, new = self._codec(), [token for token in event.tokens if token not in told]
        if codec is None or not new:
            return event.line
        unknown = [token for token in new if token not in self._texts]
        if len(unknown) > MANY:
            await asyncio.to_thread(self._learn, codec, unknown)
        else:
            self._learn(codec, unknown)
        told.update(new)
        texts = ENCODER.encode({str(token): self._texts[token] for token in new})
        return event.line[:-1] + b',"texts":' + texts + b"}"

    def _learn(self, codec: TextCodec, tokens: list[int]) -> None:
        for token in tokens:
            self._texts[token] = codec.spell([token])


def router(events: Events, codec: Callable[[], TextCodec | None], every: float = 15.0) -> APIRouter:
    """The endpoint. `every`: seconds of silence after which there is a comment."""
    made, speller = APIRouter(), Speller(codec)

    async def written(one: Told | int, told: set[int]) -> bytes:
        if isinstance(one, int):
            return b'event: gap\ndata: {"missed":%d}\n\n' % one
        number = b"id: %d\n" % one.number if one.number else b""
        return b"%sevent: %s\ndata: %s\n\n" % (number, one.event.kind.encode(), await speller.line(one.event, told))

    async def stream(after: int | None) -> AsyncGenerator[bytes]:
        told = set[int]()
        yield HELLO
        async with aclosing(events.follow(after)) as followed:
            async for some in followed:
                yield b"".join([await written(one, told) for one in some])

    @made.get("/v1/spec/events", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
    async def tell(
        after: Annotated[int | None, Query(ge=0, le=2**53, description="Go on after the event of this id.")] = None,
        last_event_id: Annotated[str, Header(max_length=100)] = "",
    ) -> Response:
        """Lines of a trace as they happen: the head, then each round of each request."""
        if re.fullmatch(r"[0-9]{1,16}", last_event_id):  # a browser that comes back
            after = int(last_event_id)
        return EventStream(stream(after), lambda error: None, lambda: ALIVE, every)

    return made
