"""Endpoint /v1/spec/events: trace events of every round as server-sent events (format: docs/reference/trace.md)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.responses import Response

from swiftspec.observe.trace_format import TokenText, text_fields
from swiftspec.serve.link.frames import TraceEvent
from swiftspec.serve.link.trace_events import NumberedEvent, TraceEventBuffer
from swiftspec.serve.sse import ENCODER, EventStream, Write
from swiftspec.text.codec import TextCodec

MAX_INLINE_TOKENS = 200  # more unknown tokens are detokenized in a thread
RETRY_FIELD = b"retry: 1000\n\n"  # milliseconds until a browser reconnects
KEEP_ALIVE_COMMENT = b": still here\n\n"


class TokenTextCache:
    """Cache of token texts: each token is detokenized once, and its text is sent once to each subscriber."""

    def __init__(self, codec: Callable[[], TextCodec | None]) -> None:
        self._codec, self._texts = codec, dict[int, TokenText]()

    async def line_with_texts(self, event: TraceEvent, sent_tokens: set[int]) -> bytes:
        """Returns the line of an event with the fields of `text_fields` for its tokens that are not in
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
        fields = ENCODER.encode(text_fields({token: self._texts[token] for token in new}))
        return event.line[:-1] + b"," + fields[1:]

    def _add_texts(self, codec: TextCodec, tokens: list[int]) -> None:
        for token in tokens:
            self._texts[token] = codec.trace_text(token)


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

    async def write_events(after: int | None, write: Write) -> None:
        sent_tokens = set[int]()
        await write(RETRY_FIELD)
        async with aclosing(events.subscribe(after)) as batches:
            async for batch in batches:
                await write(b"".join([await encode_item(item, sent_tokens) for item in batch]))

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
        return EventStream(partial(write_events, after), lambda error: None, lambda: KEEP_ALIVE_COMMENT, keep_alive_s)

    return router
