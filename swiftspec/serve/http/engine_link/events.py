"""Endpoint /v1/spec/events: trace events of every round as server-sent events (format: docs/reference/trace.md).

Rank 0 records trace events only while there are subscribers. The events go into one ring buffer, which each subscriber
reads at its own speed. A subscriber that is too slow receives the number of events that it missed.
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

from swiftspec.serve.http.engine_link.frames import EngineInfo, TraceEvent
from swiftspec.serve.http.sse import ENCODER, EventStream
from swiftspec.serve.text.codec import TextCodec

MAX_BUFFERED_EVENTS = 10_000  # in the ring buffer
MAX_BUFFERED_BYTES = 32 << 20  # total size of the lines in the ring buffer
MAX_INLINE_TOKENS = 200  # more unknown tokens are detokenized in a thread
FLUSH_INTERVAL_S = 0.016  # a frame at 60 Hz: the page does not draw more often
MAX_BATCH_EVENTS = 64  # events per write
RETRY_FIELD = b"retry: 1000\n\n"  # milliseconds until a browser reconnects
KEEP_ALIVE_COMMENT = b": still here\n\n"


@dataclass(frozen=True, slots=True)
class NumberedEvent:
    """Trace event with its sequence number. Number 0 is the header, which every subscriber receives first."""

    number: int
    event: TraceEvent


class TraceEventBuffer:
    """Ring buffer of trace events.

    `set_recording`: callback that turns recording in rank 0 on or off.
    `max_events`, `max_bytes`: limits of the buffer; `max_bytes` counts the lines of the events.
    """

    def __init__(
        self,
        set_recording: Callable[[bool], None],
        max_events: int = MAX_BUFFERED_EVENTS,
        max_bytes: int = MAX_BUFFERED_BYTES,
    ) -> None:
        self._set_recording, self._max_events, self._max_bytes = set_recording, max_events, max_bytes
        self._ring: deque[NumberedEvent] = deque()
        self._num_bytes, self._last_number = 0, 0  # bytes in the ring buffer; last sequence number
        self._header: TraceEvent | None = None
        self._num_subscribers, self._closed = 0, False
        self._changed = asyncio.Event()  # set when events arrive, and then replaced

    def begin(self, ready: EngineInfo) -> None:
        """Handles a start or restart of rank 0: appends a header, since rank 0 now numbers its requests from 1 again,
        and turns recording on if there are subscribers."""
        self._header = TraceEvent("head", ENCODER.encode(ready.trace_head), [])
        self.put(self._header)
        if self._num_subscribers:
            self._set_recording(True)

    def put(self, *events: TraceEvent) -> None:
        """Appends events and drops the oldest ones beyond the limits."""
        for event in events:
            self._last_number += 1
            self._ring.append(NumberedEvent(self._last_number, event))
            self._num_bytes += len(event.line)
        while self._ring and (len(self._ring) > self._max_events or self._num_bytes > self._max_bytes):
            self._num_bytes -= len(self._ring.popleft().event.line)
        self._notify()

    def close(self) -> None:
        """Ends the generators of all subscribers."""
        self._closed = True
        self._notify()

    async def subscribe(self, after: int | None) -> AsyncGenerator[list[NumberedEvent | int]]:
        """Yields batches of events: the header, then events as they arrive. An int in a batch is the number of events
        that this subscriber missed.

        `after`: sequence number of the last event that the subscriber has; None: begin with the next event. A number
            that does not exist yet, as after a restart of the front end, begins with the oldest event.
        Callers must close the generator (`contextlib.aclosing`).
        """
        position = self._last_number if after is None else after if after <= self._last_number else 0
        self._num_subscribers += 1
        if self._num_subscribers == 1:
            self._set_recording(True)
        try:
            if self._header is not None:
                yield [NumberedEvent(0, self._header)]
            while not self._closed:
                if position == self._last_number:
                    await self._changed.wait()
                    await asyncio.sleep(FLUSH_INTERVAL_S)  # events that arrive meanwhile join the batch
                    continue
                first = self._last_number - len(self._ring) + 1
                missed = [first - 1 - position] if position + 1 < first else []
                position = max(position, first - 1)
                batch = list(islice(self._ring, position + 1 - first, position + 1 - first + MAX_BATCH_EVENTS))
                position += len(batch)
                yield [*missed, *batch]
        finally:
            self._num_subscribers -= 1
            if self._num_subscribers == 0:
                self._set_recording(False)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class TokenTextCache:
    """Cache of token texts: each token is detokenized once, and its text is sent once to each subscriber."""

    def __init__(self, codec: Callable[[], TextCodec | None]) -> None:
        self._codec, self._texts = codec, dict[int, str]()

    async def line_with_texts(self, event: TraceEvent, sent_tokens: set[int]) -> bytes:
        """Returns the line of an event with a field `texts`: the text of each of its tokens that is not in
        `sent_tokens`. Adds these tokens to `sent_tokens`. Returns the line unchanged while the tokenizer loads."""
        codec, new = self._codec(), [token for token in event.tokens if token not in sent_tokens]
        if codec is None or not new:
            return event.line
        unknown = [token for token in new if token not in self._texts]
        if len(unknown) > MAX_INLINE_TOKENS:
            await asyncio.to_thread(self._add_texts, codec, unknown)
        else:
            self._add_texts(codec, unknown)
        sent_tokens.update(new)
        texts = ENCODER.encode({str(token): self._texts[token] for token in new})
        return event.line[:-1] + b',"texts":' + texts + b"}"

    def _add_texts(self, codec: TextCodec, tokens: list[int]) -> None:
        for token in tokens:
            self._texts[token] = codec.token_text([token])


def trace_events_router(
    events: TraceEventBuffer, codec: Callable[[], TextCodec | None], keep_alive_s: float = 15.0
) -> APIRouter:
    """Returns the router of /v1/spec/events.

    `codec`: returns the target's tokenizer, or None while it loads.
    `keep_alive_s`: seconds without output after which a stream sends a comment.
    """
    router, token_texts = APIRouter(), TokenTextCache(codec)

    async def encode_item(item: NumberedEvent | int, sent_tokens: set[int]) -> bytes:
        if isinstance(item, int):
            return b'event: gap\ndata: {"missed":%d}\n\n' % item
        number = b"id: %d\n" % item.number if item.number else b""
        return b"%sevent: %s\ndata: %s\n\n" % (
            number,
            item.event.kind.encode(),
            await token_texts.line_with_texts(item.event, sent_tokens),
        )

    async def stream(after: int | None) -> AsyncGenerator[bytes]:
        sent_tokens = set[int]()
        yield RETRY_FIELD
        async with aclosing(events.subscribe(after)) as batches:
            async for batch in batches:
                yield b"".join([await encode_item(item, sent_tokens) for item in batch])

    @router.get("/v1/spec/events", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
    async def stream_trace_events(
        after: Annotated[
            int | None, Query(ge=0, le=2**53, description="Continue after the event with this id.")
        ] = None,
        last_event_id: Annotated[str, Header(max_length=100)] = "",
    ) -> Response:
        """Trace events as they occur: the header, then each round of each request."""
        if re.fullmatch(r"[0-9]{1,16}", last_event_id):  # a browser that reconnects
            after = int(last_event_id)
        return EventStream(stream(after), lambda error: None, lambda: KEEP_ALIVE_COMMENT, keep_alive_s)

    return router
