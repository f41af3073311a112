"""Endpoint /v1/chat/completions: OpenAI's chat completions."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from swiftspec.serve.http.api.choices import requested_choices, sampled_requests
from swiftspec.serve.http.api.generation import JSON_OR_SSE, chat_generation_request, respond
from swiftspec.serve.http.api.sampling import grammar_request
from swiftspec.serve.http.app_context import AppContext, new_id
from swiftspec.serve.http.errors import ApiError
from swiftspec.serve.http.format.conversation import (
    Conversation,
    Message,
    NamedTool,
    TemplateFields,
    Tool,
    ToolChoice,
    to_template_messages,
)
from swiftspec.serve.http.format.generation_output import GenerationOutput, OutputDelta, RequestOutputs
from swiftspec.serve.http.format.logprobs import LogprobFormatter
from swiftspec.serve.http.format.tools import ParsedToolCall
from swiftspec.serve.http.schema import (
    CHAT_UNSUPPORTED,
    INTEGRAL,
    N_DESCRIPTION,
    ConstraintFields,
    Count,
    JsonObject,
    Positive,
    SamplingFields,
    ShortText,
    Stop,
    Stops,
    StreamOptions,
    Text,
    reject_unsupported,
)
from swiftspec.serve.http.sse import DONE_EVENT, sse_event


class ChatRequest(SamplingFields, ConstraintFields, TemplateFields):
    """Request of OpenAI's chat completions endpoint, with vLLM's sampling parameters."""

    model: ShortText | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    stop: Stop | Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), INTEGRAL] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    n: Count | None = Field(None, description=N_DESCRIPTION)
    # Fields of OpenAI or vLLM that this server does not support: see CHAT_UNSUPPORTED.
    audio: JsonObject | None = None
    modalities: Annotated[list[ShortText], Field(max_length=8)] | None = None
    functions: Annotated[list[Any], Field(max_length=128)] | None = None
    function_call: ShortText | JsonObject | None = None
    chat_template: Text | None = None
    documents: Annotated[list[Any], Field(max_length=4096)] | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    web_search_options: JsonObject | None = None


def chat_to_conversation(body: ChatRequest) -> Conversation:
    """Converts a request to a conversation for the chat template. Raises ApiError on content that is not text."""
    tools = [item.to_template() for item in body.tools or ()]
    choice = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else body.tool_choice or "auto"
    return Conversation(
        to_template_messages(body.messages), tools, choice, body.template_variables(),
        bool(body.continue_final_message),
        body.parallel_tool_calls is False,
    )  # fmt: skip


def stop_list(stop: str | list[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else stop or []


def openai_tool_call(call: ParsedToolCall) -> dict[str, Any]:
    """Returns a tool call in OpenAI's schema."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}


def assistant_message(output: GenerationOutput) -> dict[str, Any]:
    """Returns the complete message of the assistant."""
    message: dict[str, Any] = {"role": "assistant", "content": output.content, "refusal": None}
    if output.tool_calls:
        message |= {
            "content": output.content or None,
            "tool_calls": [openai_tool_call(call) for call in output.tool_calls],
        }
    if output.reasoning_text:
        message["reasoning_content"] = output.reasoning_text
    return message


class ChatWriter:
    """Formatter of the outputs of a request as a response of OpenAI's chat completions endpoint.

    `top`: number of top log-probabilities per token; None: no log-probabilities.
    `usage`: whether a stream ends with a usage chunk.
    """

    def __init__(
        self, outputs: RequestOutputs, model: str, logprob_formatter: LogprobFormatter, top: int | None, usage: bool
    ) -> None:
        self._outputs, self._logprob_formatter, self._top, self._usage = outputs, logprob_formatter, top, usage
        self._common_fields = {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
        }
        self._common_fields["model"] = model
        self._streaming = False
        self._num_calls: dict[int, int] = {}  # tool calls so far, by choice that has begun

    def start_events(self) -> bytes:
        """Returns nothing: each choice begins with a chunk of its own."""
        self._streaming = True
        return b""

    def delta_events(self, delta: OutputDelta) -> bytes:
        """Returns the chunk of one round, after the chunk with the role if it is the first of its choice. The last
        delta of a choice becomes the chunk with the finish reason. Returns nothing if the round adds nothing visible,
        or if the response is not a stream."""
        if not self._streaming:
            return b""
        choice, head = delta.choice, b""
        if choice not in self._num_calls:
            self._num_calls[choice] = 0
            head = self._chunk(choice, {"role": "assistant", "content": ""})
        if delta.last:
            return head + self._end_chunk(choice)
        fields: dict[str, Any] = {}
        if delta.reasoning_text:
            fields["reasoning_content"] = delta.reasoning_text
        if delta.content or not (delta.reasoning_text or delta.tool_calls):
            fields["content"] = delta.content
        if delta.tool_calls:
            fields["tool_calls"] = [
                {"index": self._num_calls[choice] + index, **openai_tool_call(call)}
                for index, call in enumerate(delta.tool_calls)
            ]
            self._num_calls[choice] += len(delta.tool_calls)
        if self._top is None and fields == {"content": ""}:
            return head
        logprobs = self._logprobs(self._outputs.outputs[choice], delta.first_token, delta.end_token)
        return head + self._chunk(choice, fields, logprobs)

    def end_events(self) -> bytes:
        """Returns the usage chunk, if requested, and the end of the stream."""
        outputs, last = self._outputs, b""
        if self._usage:
            last = sse_event({**self._common_fields, "choices": [], "usage": outputs.usage(), **outputs.stats()})
        return last + DONE_EVENT

    def full_response(self) -> dict[str, Any]:
        """Returns the complete response."""
        outputs = self._outputs
        choices = [
            {
                "index": index, "message": assistant_message(choice),
                "logprobs": self._logprobs(choice, 0, len(choice.tokens)), "finish_reason": choice.finish_reason,
                **outputs.choice_end_fields(choice),
            }
            for index, choice in outputs.choices()
        ]  # fmt: skip
        head = {**self._common_fields, "object": "chat.completion"}
        return {**head, "choices": choices, "usage": outputs.usage(), **outputs.stats()}

    def _logprobs(self, output: GenerationOutput, first: int, last: int) -> dict[str, Any] | None:
        if self._top is None:
            return None
        items = self._logprob_formatter.chat_logprobs(output.tokens[first:last], output.logprobs[first:last], self._top)
        return {"content": items, "refusal": None}

    def _end_chunk(self, choice: int) -> bytes:
        """Returns the chunk with the finish reason. That of the last choice has the statistics of the request, unless
        the usage chunk has them."""
        output = self._outputs.outputs[choice]
        fields = {"finish_reason": output.finish_reason, **self._outputs.choice_end_fields(output)}
        return self._chunk(choice, {}, None, fields, {} if self._usage else self._outputs.stats())

    def _chunk(
        self, choice: int, delta: dict[str, Any], logprobs: Any = None, end: dict[str, Any] | None = None,
        stats: dict[str, Any] | None = None,
    ) -> bytes:  # fmt: skip
        item = {"index": choice, "delta": delta, "logprobs": logprobs, **(end or {"finish_reason": None})}
        return sse_event({**self._common_fields, "choices": [item], **(stats or {})})


def chat_router(context: AppContext) -> APIRouter:
    """Returns the router of /v1/chat/completions."""
    router = APIRouter()

    @router.post("/v1/chat/completions", responses=JSON_OR_SSE)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        info, codec = context.require_ready()
        model = context.resolve_model_name(body.model)
        reject_unsupported(body, CHAT_UNSUPPORTED)
        choices = requested_choices(body, body.n, body.stream, info)
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs to be true", "top_logprobs")
        top = (body.top_logprobs or 0) if body.logprobs else None
        limit = body.max_completion_tokens or body.max_tokens
        generation_request = await chat_generation_request(
            context, request, body, chat_to_conversation(body), limit=limit, stops=stop_list(body.stop),
            grammar=grammar_request(body), logprobs=top, choices=choices.population,
        )  # fmt: skip
        usage = context.always_usage or bool(body.stream_options and body.stream_options.include_usage)
        requests = sampled_requests(generation_request, choices.num_samples, body.seed is not None)
        outputs = RequestOutputs.create([requests], codec, choices.n)
        writer = ChatWriter(outputs, model, LogprobFormatter(codec), top, usage)
        return await respond(context, request, outputs, writer, body.stream)

    return router
