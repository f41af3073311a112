"""From a conversation to an answer: the prompt, its tools, its thoughts, and what the answer has to keep to."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import Response

from swiftspec.errors import UserError
from swiftspec.serve.http import errors
from swiftspec.serve.http.api.sampling import Grammar, sampling_of
from swiftspec.serve.http.app_context import Server
from swiftspec.serve.http.engine_link.engine import Ask
from swiftspec.serve.http.errors import ApiError, told, unsupported
from swiftspec.serve.http.format.answer import Answer, Job, Part
from swiftspec.serve.http.format.conversation import Talked
from swiftspec.serve.http.format.reasoning import CLOSE, OPEN, Reasoning
from swiftspec.serve.http.format.tools import Calls, Format, forced, format_of
from swiftspec.serve.http.schema import Sampled
from swiftspec.serve.http.sse import ENCODER, EventStream, event, unless_gone
from swiftspec.serve.text.codec import TextCodec
from swiftspec.serve.text.template import TooLong

KEY = "x-replace-key"
LOG = logging.getLogger("swiftspec.serve")
EVENT = {  # one of a stream, as OpenAPI before 3.2 has it
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
BOTH_WAYS: dict[int | str, dict[str, Any]] = {  # for the OpenAPI document
    200: {
        "description": "The answer: one object, or with `stream` its parts as server-sent events.",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": EVENT},
        },
    }
}
NO_FORMAT = "this model's chat template takes no tools, or has calls written in no way that is known here"


class Writer(Protocol):
    """An answer in the shape of one endpoint."""

    def begin(self) -> bytes:
        """The events before the first part."""
        ...

    def part(self, part: Part) -> bytes:
        """The events of one round; none where it shows nothing."""
        ...

    def end(self) -> bytes:
        """The events after the last part."""
        ...

    def whole(self) -> dict[str, object]:
        """The answer in one piece."""
        ...


def replace_key(request: Request, body: Sampled) -> str | None:
    """Of the requests with one key the newest replaces the others. Raises ApiError on a key too long."""
    key = body.replace_key or request.headers.get(KEY)
    if key is not None and not 0 < len(key) <= 128:
        raise ApiError(400, f"{KEY} must have 1..128 characters", KEY)
    return key


async def encode_talk(server: Server, talked: Talked) -> list[int]:
    """The prompt of a conversation. Raises ApiError on one that the model's template does not take."""
    about, codec = server.ready()
    talked.check()
    if not codec.has_template:
        raise ApiError(400, "this model has no chat template: send plain text to /v1/completions")
    tools = talked.tools if talked.tools and talked.choice != "none" else None
    try:
        return await server.threaded(
            codec.encode_chat, talked.messages, about.max_model_len, tools, talked.variables, talked.goes_on
        )
    except UserError as error:  # where the model lies is no client's business
        message = str(error).replace(f"{codec.path}: ", "")
        code = "context_length_exceeded" if isinstance(error, TooLong) else None
        raise ApiError(400, message, "messages", code) from None


async def chat_job(
    server: Server, request: Request, body: Sampled, talked: Talked, *, limit: int | None,
    stops: Sequence[str] = (), grammar: Grammar | None = None, logprobs: int | None = None,
    choices: tuple[int, int] | None = None,
) -> Job:  # fmt: skip
    """What the answer to a conversation is to be. Raises ApiError on whatever cannot be done."""
    about, codec = server.ready()
    prompt = await encode_talk(server, talked)
    negative = None
    if body.guidance_scale not in (None, 1):
        user = {"role": "user", "content": body.negative_prompt or ""}
        negative = await encode_talk(server, Talked([user], variables=talked.variables))
    sampling = sampling_of(body, about, prompt, negative, limit)
    if logprobs is not None:
        sampling["logprobs"] = logprobs
    template = codec.template(talked.tools or None)
    form = _format(talked, template)
    if form is not None and talked.choice != "auto":
        if grammar is not None:
            raise ApiError(400, f"{grammar[2]} and tool_choice both say what the answer is: give one", "tool_choice")
        grammar = _forced(form, talked, codec)
    if grammar is not None:
        sampling["grammar"] = await server.grammar(grammar)
    thinks = grammar is None and not talked.goes_on and (OPEN in template or OPEN in codec.vocab)
    names = [tool["function"]["name"] for tool in talked.tools]
    return Job(
        Ask(prompt, sampling, replace_key(request, body), choices),
        stops,
        goes_on=talked.goes_on,
        reasoning=Reasoning(codec.spell(prompt[-8:]).rstrip().endswith(OPEN)) if thinks else None,
        calls=None if form is None else Calls(form, names),
        single=talked.single and form is not None,
        markers=_markers(codec, [OPEN, CLOSE] * thinks + ([form.begin, form.end or ""] if form else [])),
    )


def _format(talked: Talked, template: str) -> Format | None:
    if not talked.tools or talked.choice == "none":
        return None
    form = format_of(template)
    if form is None:
        raise unsupported("tools", NO_FORMAT)
    return form


def _forced(form: Format, talked: Talked, codec: TextCodec) -> Grammar:
    """A grammar of one call: of any tool, or of the one that is named."""
    tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in talked.tools}
    if talked.choice != "required":
        tools = {talked.choice: tools[talked.choice]}
    marker = codec.vocab.get(form.begin)
    return "lark", forced(form, tools, marker if marker in codec.special else None), "tool_choice"


def _markers(codec: TextCodec, words: Sequence[str]) -> frozenset[int]:
    return frozenset(codec.vocab[word] for word in words if word in codec.vocab)


async def respond(server: Server, request: Request, answer: Answer, writer: Writer, stream: bool | None) -> Response:
    """Has the engine answer, and sends what the writer makes of it: in one piece, or as it comes."""
    if not stream:

        async def all_of_it() -> None:
            async with contextlib.aclosing(answer.parts(server.engine)) as parts:
                async for part in parts:
                    writer.part(part)

        await unless_gone(request.receive, all_of_it())
        return Response(ENCODER.encode(writer.whole()), media_type="application/json")
    path = request.url.path

    def failed(error: Exception) -> bytes:
        known = told(error)
        if known.code == "internal_error":
            LOG.error("an answer broke off", exc_info=error)
        return event(errors.body(known, path), "error" if path.startswith(errors.ANTHROPIC) else None)

    def comment() -> bytes:
        return b": queued\n\n" if not answer.started and server.engine.state.waiting else b": keep-alive\n\n"

    return EventStream(_events(server, answer, writer), failed, comment, server.every)


async def _events(server: Server, answer: Answer, writer: Writer) -> AsyncGenerator[bytes]:
    begin = writer.begin
    async with contextlib.aclosing(answer.parts(server.engine)) as parts:
        async for part in parts:
            data = begin() + writer.part(part)
            begin = bytes
            if data:
                yield data
    yield begin() + writer.end()
