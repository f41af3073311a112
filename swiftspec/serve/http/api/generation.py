"""Generation for one HTTP request: builds the engine request of a conversation, and sends the output as JSON or SSE."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import Response

from swiftspec.errors import UserError
from swiftspec.serve.http import errors
from swiftspec.serve.http.api.sampling import GrammarRequest, sampling_params
from swiftspec.serve.http.api.token_fields import bad_word_ids, scoring_params, truncate_prompt, truncates
from swiftspec.serve.http.app_context import AppContext
from swiftspec.serve.http.engine_link.engine_client import EngineClient, EngineRequest
from swiftspec.serve.http.errors import ApiError, to_api_error, unsupported
from swiftspec.serve.http.format.conversation import Conversation, template_message
from swiftspec.serve.http.format.generation_output import GenerationRequest, OutputDelta
from swiftspec.serve.http.format.reasoning import REASONING_CLOSE, REASONING_OPEN, ReasoningParser
from swiftspec.serve.http.format.tools import (
    AllowedText,
    ToolCallFormat,
    ToolCallParser,
    detect_tool_format,
    tool_call_grammar,
)
from swiftspec.serve.http.schema import SamplingFields, ScoringFields
from swiftspec.serve.http.sse import ENCODER, EventStream, cancel_on_disconnect, sse_event
from swiftspec.serve.text.codec import TextCodec
from swiftspec.serve.text.template import PromptTooLong

REPLACE_KEY_HEADER = "x-replace-key"
LOG = logging.getLogger("swiftspec.serve")
EVENT_SCHEMA = {  # one server-sent event; OpenAPI before 3.2 cannot describe a stream of them
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
JSON_OR_SSE: dict[int | str, dict[str, Any]] = {  # for the OpenAPI document
    200: {
        "description": "The answer: one object, or with `stream` its parts as server-sent events.",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": EVENT_SCHEMA},
        },
    }
}
ANSWER_FORMATS = ("response_format", "text.format", "output_config.format")  # constrain the answer, but not tool calls
NO_TOOL_FORMAT = "this model's chat template does not support tools, or its tool call format is unknown"


class OutputSource(Protocol):
    """The outputs of one HTTP request: a `GenerationOutput` or `RequestOutputs`."""

    @property
    def started(self) -> bool: ...
    def deltas(self, engine: EngineClient) -> AsyncGenerator[OutputDelta]: ...


class OutputWriter(Protocol):
    """Formatter of the outputs of a request in the schema of one endpoint."""

    def start_events(self) -> bytes:
        """Returns the events before the first delta."""
        ...

    def delta_events(self, delta: OutputDelta) -> bytes:
        """Returns the events of one round; empty if the round adds nothing visible. Also called without `stream`, when
        `start_events` is not."""
        ...

    def end_events(self) -> bytes:
        """Returns the events after the last delta."""
        ...

    def full_response(self) -> dict[str, object]:
        """Returns the complete response of a request without `stream`."""
        ...


def replace_key(request: Request, body: SamplingFields) -> str | None:
    """Returns the replace key of a request, from its body or header, or None. A request replaces unfinished requests
    with the same key. Raises ApiError if the key is empty or too long."""
    key = body.replace_key or request.headers.get(REPLACE_KEY_HEADER)
    if key is not None and not 0 < len(key) <= 128:
        raise ApiError(400, f"{REPLACE_KEY_HEADER} must have 1..128 characters", REPLACE_KEY_HEADER)
    return key


async def encode_conversation(
    context: AppContext, conversation: Conversation, *, any_length: bool = False
) -> list[int]:
    """Renders a conversation with the model's chat template and tokenizes it. Raises ApiError if the
    conversation is invalid, too long, or rejected by the template. `any_length`: whether it may be longer than the
    context."""
    info, codec = context.require_ready()
    conversation.validate()
    if not codec.has_template:
        raise ApiError(400, "this model has no chat template: send plain text to /v1/completions")
    tools = conversation.tools if conversation.tools and conversation.tool_choice != "none" else None
    try:
        return await context.run_in_tokenizer_thread(
            codec.encode_chat,
            conversation.messages,
            None if any_length else info.max_model_len,
            tools,
            conversation.template_variables,
            conversation.continues_last_message,
            conversation.add_generation_prompt,
        )
    except UserError as error:  # the path of the model is not shown to clients
        message = str(error).replace(f"{codec.path}: ", "")
        code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
        raise ApiError(400, message, "messages", code) from None


async def chat_generation_request(
    context: AppContext, request: Request, body: SamplingFields, conversation: Conversation, *, limit: int | None,
    stops: Sequence[str] = (), grammar: GrammarRequest | None = None, logprobs: int | None = None,
    choices: tuple[int, int] | None = None, scoring: ScoringFields | None = None, stream: bool | None = None,
    keep_cut_call: bool = False,
) -> GenerationRequest:  # fmt: skip
    """Builds the generation request for the answer to a conversation.

    `limit`: maximum number of output tokens; None: the server's default, or the rest of the context.
    `stops`: stop strings.
    `grammar`: constraint of the output. A tool that must be called replaces a format of the answer.
    `logprobs`: number of top log-probabilities per token; None: no log-probabilities.
    `choices`: (number of texts to return, number to sample) in mode smc; None: a single text.
    `scoring`: the request's fields for log-probabilities; None if the endpoint has none.
    `stream`: the field of the request.
    `keep_cut_call`: whether the output has a tool call whose arguments a limit cut, if a tool must be called.
    Raises ApiError on an unsupported combination of fields.
    """
    info, codec = context.require_ready()
    prompt = await encode_conversation(context, conversation, any_length=truncates(body))
    prompt = truncate_prompt(prompt, body, info, limit)
    negative = await _negative_prompt(context, body, conversation)
    sampling = sampling_params(body, info, prompt, negative, limit) | await bad_word_ids(context, codec, body)
    sampling |= scoring_params(scoring or ScoringFields.model_validate({}), info, logprobs, stream=stream)
    template = codec.template_source(conversation.tools or None)
    tool_format = _tool_format(conversation, template)
    allowed: AllowedText = "any"
    if tool_format is not None:
        allowed = "calls" if conversation.forces_tool_call else "calls_or_answer" if _is_format(grammar) else "any"
        grammar = _grammar_with_tools(grammar, tool_format, conversation, codec)
    if grammar is not None:
        sampling["grammar"] = await context.compile_grammar(grammar)
    thinks = (
        grammar is None
        and not conversation.continues_last_message
        and (REASONING_OPEN in template or REASONING_OPEN in codec.vocab)
    )
    names = [tool["function"]["name"] for tool in conversation.tools]
    return GenerationRequest(
        EngineRequest(prompt, sampling, replace_key(request, body), choices),
        stops,
        continues_text=conversation.continues_last_message,
        reasoning_parser=ReasoningParser(codec.token_text(prompt[-8:]).rstrip().endswith(REASONING_OPEN))
        if thinks
        else None,
        tool_call_parser=None if tool_format is None else ToolCallParser(tool_format, names, allowed, keep_cut_call),
        single_tool_call=conversation.single_tool_call and tool_format is not None,
        marker_tokens=_marker_ids(
            codec,
            [REASONING_OPEN, REASONING_CLOSE] * thinks
            + ([tool_format.begin, tool_format.end or ""] if tool_format else []),
        ),
        include_stop=bool(body.include_stop_str_in_output),
        end_tokens=info.eos_token_ids,
        skip_special_tokens=body.skip_special_tokens is not False,
    )


async def _negative_prompt(context: AppContext, body: SamplingFields, conversation: Conversation) -> list[int] | None:
    """Returns the token ids of the negative prompt as a conversation, or None without guidance."""
    if body.guidance_scale in (None, 1):
        return None
    user = template_message("user", body.negative_prompt or "")
    return await encode_conversation(context, Conversation([user], template_variables=conversation.template_variables))


def _tool_format(conversation: Conversation, template: str) -> ToolCallFormat | None:
    if not conversation.tools or conversation.tool_choice == "none":
        return None
    tool_format = detect_tool_format(template)
    if tool_format is None:
        raise unsupported("tools", NO_TOOL_FORMAT)
    return tool_format


def _is_format(grammar: GrammarRequest | None) -> bool:
    return grammar is not None and grammar[2] in ANSWER_FORMATS


def _grammar_with_tools(
    grammar: GrammarRequest | None, tool_format: ToolCallFormat, conversation: Conversation, codec: TextCodec
) -> GrammarRequest | None:
    """Returns the grammar of an output that can call tools.

    If a tool must be called, the grammar accepts exactly one call: of any tool, or of the one that `tool_choice` names.
    Otherwise the format of the answer (`ANSWER_FORMATS`) restricts only an answer without calls, and any other
    constraint the whole output. Raises ApiError if such a constraint excludes the call.
    """
    forced = conversation.forces_tool_call
    if not forced and not _is_format(grammar):
        return grammar
    if grammar is not None and not _is_format(grammar):
        raise ApiError(400, f"{grammar[2]} and tool_choice both constrain the answer; omit one of them", "tool_choice")
    tools = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in conversation.tools}
    if forced and conversation.tool_choice in tools:
        tools = {conversation.tool_choice: tools[conversation.tool_choice]}
    begin = codec.vocab.get(tool_format.begin)
    marker = begin if begin in codec.special else None
    if forced or grammar is None:
        return "lark", tool_call_grammar(tool_format, tools, marker), "tool_choice"
    text = tool_call_grammar(tool_format, tools, marker, json.loads(grammar[1]), conversation.single_tool_call)
    return "lark", text, grammar[2]


def _marker_ids(codec: TextCodec, words: Sequence[str]) -> frozenset[int]:
    return frozenset(codec.vocab[word] for word in words if word in codec.vocab)


async def respond(
    context: AppContext, request: Request, output: OutputSource, writer: OutputWriter, stream: bool | None,
    error_events: Callable[[ApiError], bytes] | None = None,
) -> Response:  # fmt: skip
    """Runs the generation and returns the response of `writer`: a JSON object, or with `stream` server-sent events.

    `error_events`: returns the last events of a stream that fails; by default one event in the schema of the API.
    """
    if not stream:

        async def run_to_end() -> None:
            async with contextlib.aclosing(output.deltas(context.engine)) as deltas:
                async for delta in deltas:
                    writer.delta_events(delta)

        await cancel_on_disconnect(request.receive, run_to_end())
        return Response(ENCODER.encode(writer.full_response()), media_type="application/json")
    anthropic = errors.uses_anthropic_schema(request.scope)

    def error_event(error: Exception) -> bytes:
        api_error = to_api_error(error)
        if api_error.code == "internal_error":
            LOG.error("a streamed response failed", exc_info=error)
        if error_events is not None:
            return error_events(api_error)
        return sse_event(errors.error_body(api_error, anthropic), "error" if anthropic else None)

    def comment() -> bytes:
        return b": queued\n\n" if not output.started and context.engine.state.waiting else b": keep-alive\n\n"

    return EventStream(_events(context, output, writer), error_event, comment, context.keep_alive_s)


async def _events(context: AppContext, output: OutputSource, writer: OutputWriter) -> AsyncGenerator[bytes]:
    start_events = writer.start_events
    async with contextlib.aclosing(output.deltas(context.engine)) as deltas:
        async for delta in deltas:
            data = start_events() + writer.delta_events(delta)
            start_events = bytes  # returns b"": the start events are sent once
            if data:
                yield data
    yield start_events() + writer.end_events()
