"""Generation for one HTTP request: builds the engine request of a conversation, and sends the output as JSON or SSE."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from swiftspec.errors import UserError
from swiftspec.params import SamplingParams
from swiftspec.serve import errors
from swiftspec.serve.api.output_format import conversation_output
from swiftspec.serve.api.sampling import GrammarRequest, context_exceeded_error, sampling_params
from swiftspec.serve.api.token_fields import bad_word_ids, prompt_truncation, scoring_params
from swiftspec.serve.app_context import AppContext
from swiftspec.serve.errors import ApiError, to_api_error
from swiftspec.serve.format.conversation import Conversation, template_message
from swiftspec.serve.format.generation_output import GenerationRequest, OutputDelta
from swiftspec.serve.format.harmony import harmony_messages, harmony_tools
from swiftspec.serve.format.template_format import (
    TemplateFormat,
    derive_template_format,
    with_written_calls,
)
from swiftspec.serve.link.engine_client import EngineClient, EngineRequest
from swiftspec.serve.metrics.request_metrics import RequestRecorder
from swiftspec.serve.schema import SamplingFields, ScoringFields
from swiftspec.serve.sse import ENCODER, EventStream, Write, cancel_on_disconnect, sse_event
from swiftspec.text.codec import TextCodec, Truncation
from swiftspec.text.harmony import harmony_markers
from swiftspec.text.template import PromptTooLong

PROBE_TIMEOUT_S = 60.0  # for all probes of a chat template after the first, also on a busy machine
PROBE_CONTEXT_TOKENS = 1 << 16  # limit of a probe, in tokens and in characters
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


class OutputSource(Protocol):
    """The outputs of one HTTP request: a `GenerationOutput` or `RequestOutputs`."""

    @property
    def started(self) -> bool: ...
    def deltas(self, engine: EngineClient, recorder: RequestRecorder) -> AsyncGenerator[OutputDelta]: ...


class OutputWriter(Protocol):
    """Formatter of the outputs of a request in the schema of one endpoint.

    `has_logprobs`: whether the response contains log-probabilities, which are formatted in a thread: those of the whole
    vocabulary take seconds, in which the event loop serves other clients.
    """

    has_logprobs: bool

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
    context: AppContext, conversation: Conversation, truncation: Truncation | None = None
) -> list[int]:
    """Renders a conversation with the model's chat template and tokenizes it. Raises ApiError if the
    conversation is invalid, too long, or rejected by the template. `truncation`: removes tokens of a conversation that
    may be longer than the context."""
    info, codec = context.require_ready()
    conversation.validate()
    if not codec.has_template:
        raise ApiError(400, "this model has no chat template: send plain text to /v1/completions")
    tools = conversation.tools if conversation.tools and conversation.tool_choice != "none" else None
    try:
        format = await template_format(context, tools)
        messages = conversation.messages
        if format.write_calls is not None:
            messages = with_written_calls(messages, format.write_calls)
        if harmony_markers(codec, codec.template_source(tools)):
            messages, tools = harmony_messages(messages), None if tools is None else harmony_tools(tools)
        return await context.run_in_tokenizer_thread(
            codec.encode_chat,
            messages,
            context=info.max_model_len,
            tools=tools,
            variables=conversation.template_variables,
            continue_final_message=conversation.continues_last_message,
            add_generation_prompt=conversation.add_generation_prompt,
            truncation=truncation,
        )
    except PromptTooLong:
        raise context_exceeded_error(None, info, "messages") from None
    except UserError as error:
        raise ApiError(400, codec.without_paths(str(error)), "messages") from None


async def template_format(context: AppContext, tools: Sequence[dict[str, Any]] | None) -> TemplateFormat:
    """Returns what the chat template shows of the model; derived once per template. `tools`: select the template, if
    the model has several. Raises UserError if the model has no chat template."""
    _, codec = context.require_ready()
    source = codec.template_source(tools)
    if source not in context.template_formats:
        context.template_formats[source] = await context.run_in_tokenizer_thread(_derive_template_format, codec, source)
    return context.template_formats[source]


def _derive_template_format(codec: TextCodec, source: str) -> TemplateFormat:
    """Derives the format of a template, for whose probes there is a limit on time and length."""
    deadline: float | None = None  # not before the process that renders templates has started

    def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, begins_answer: bool) -> str:
        nonlocal deadline
        if deadline is not None and time.monotonic() > deadline:
            raise UserError(f"its probes took longer than {PROBE_TIMEOUT_S:g} s")
        try:
            text = codec.render_chat(messages, PROBE_CONTEXT_TOKENS, tools, None, False, begins_answer)
        except UserError as error:
            raise UserError(codec.without_paths(str(error))) from None
        finally:
            deadline = deadline or time.monotonic() + PROBE_TIMEOUT_S
        if len(text) > PROBE_CONTEXT_TOKENS:
            raise UserError(f"it renders {len(text)} characters for a short conversation")
        return text

    try:
        return derive_template_format(render, source, codec.vocab)
    except Exception as error:  # a template can render anything
        LOG.warning("the format of the chat template cannot be derived", exc_info=error)
        return TemplateFormat(reason=f"its probes failed ({type(error).__name__})")


async def chat_generation_request(
    context: AppContext,
    request: Request,
    body: SamplingFields,
    conversation: Conversation,
    *,
    limit: int | None,
    stops: Sequence[str] = (),
    grammar: GrammarRequest | None = None,
    logprobs: int | None = None,
    choices: tuple[int, int] | None = None,
    scoring: ScoringFields | None = None,
    stream: bool | None = None,
    keep_cut_call: bool = False,
) -> GenerationRequest:
    """Builds the generation request for the answer to a conversation.

    `limit`: maximum number of output tokens; None: the server's default, or the rest of the context.
    `stops`: stop strings.
    `grammar`: constraint of the output. A tool that must be called replaces a format of the answer.
    `logprobs`: number of top log-probabilities per token; None: no log-probabilities.
    `choices`: (number of texts to return, number to sample) in mode smc; None: a single text.
    `scoring`: the request's fields for log-probabilities; None if the endpoint has none.
    `stream`: the field of the request.
    `keep_cut_call`: whether the output has a tool call whose arguments a limit cut; see `conversation_output`.
    Raises ApiError on an unsupported combination of fields.
    """
    info, codec = context.require_ready()
    prompt = await encode_conversation(context, conversation, prompt_truncation(body, info, limit))
    negative = await _negative_prompt(context, body, conversation)
    sampling = sampling_params(body, info, prompt, negative, limit) | await bad_word_ids(context, codec, body)
    sampling |= scoring_params(scoring or ScoringFields.model_validate({}), info, logprobs, stream=stream)
    format = await template_format(context, conversation.tools or None)
    output = conversation_output(codec, format, conversation, prompt, grammar, keep_cut_call)
    if output.grammar is not None:
        sampling["grammar"] = await context.compile_grammar(output.grammar)
    return GenerationRequest(
        EngineRequest(prompt, SamplingParams(**sampling), replace_key(request, body), choices),
        stops,
        continues_text=conversation.continues_last_message,
        parser=output.parser,
        single_tool_call=conversation.single_tool_call and output.has_calls,
        marker_tokens=output.marker_tokens,
        harmony_markers=output.harmony,
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


async def respond(
    context: AppContext,
    request: Request,
    output: OutputSource,
    writer: OutputWriter,
    stream: bool | None,
    error_events: Callable[[ApiError], bytes] | None = None,
) -> Response:
    """Runs the generation and returns the response of `writer`: a JSON object, or with `stream` server-sent events.

    `error_events`: returns the last events of a stream that fails; by default one event in the schema of the API.
    """
    if not stream:

        async def run_to_end() -> None:
            async with contextlib.aclosing(output.deltas(context.engine, context.recorder)) as deltas:
                async for delta in deltas:
                    writer.delta_events(delta)

        await cancel_on_disconnect(request.receive, run_to_end())
        data = await _format(writer, lambda: ENCODER.encode(writer.full_response()))
        return Response(data, media_type="application/json")
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

    return EventStream(partial(_write_events, context, output, writer), error_event, comment, context.keep_alive_s)


async def _format(writer: OutputWriter, encode: Callable[[], bytes]) -> bytes:
    """Returns the result of `encode`, a part of the response of `writer`."""
    return await run_in_threadpool(encode) if writer.has_logprobs else encode()


async def _write_events(context: AppContext, output: OutputSource, writer: OutputWriter, write: Write) -> None:
    """Runs the generation and writes the events of each round."""
    start_events = writer.start_events
    async with contextlib.aclosing(output.deltas(context.engine, context.recorder)) as deltas:
        async for delta in deltas:
            data = start_events() + await _format(writer, partial(writer.delta_events, delta))
            start_events = bytes  # returns b"": the start events are sent once
            if data:
                await write(data)
    await write(start_events() + writer.end_events())
