"""Endpoint /v1/chat/completions: OpenAI's chat completions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from swiftspec.serve.http.api.generation import JSON_OR_SSE, chat_generation_request, respond
from swiftspec.serve.http.api.sampling import grammar_request, requested_choices
from swiftspec.serve.http.api.token_fields import listed_logprobs, response_fields
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
from swiftspec.serve.http.format.generation_output import GenerationOutput, OutputDelta, choice_end_fields
from swiftspec.serve.http.format.logprobs import LogprobFormatter, TokenFields
from swiftspec.serve.http.format.tools import ParsedToolCall
from swiftspec.serve.http.known_fields import reject_unsupported
from swiftspec.serve.http.schema import (
    ConstraintFields,
    Count,
    LogprobCount,
    Positive,
    SamplingFields,
    ScoringFields,
    ShortText,
    Stop,
    Stops,
    StreamOptions,
)
from swiftspec.serve.http.sse import DONE_EVENT, sse_event


class ChatRequest(SamplingFields, ConstraintFields, TemplateFields, ScoringFields):
    """Request of OpenAI's chat completions endpoint, with vLLM's sampling parameters."""

    model: ShortText | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    stop: Stop | Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = Field(None, description="Requires logprobs. -1: all tokens.")
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    n: Count | None = Field(None, description="With smc: number of texts of the population, each with its weight.")


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
    """Formatter of a generation as a response of OpenAI's chat completions endpoint.

    `top`: number of top log-probabilities per token; None: no log-probabilities.
    `usage`: whether a stream ends with a usage chunk.
    `token_fields`: formatter of vLLM's additional fields.
    """

    def __init__(
        self, output: GenerationOutput, model: str, logprob_formatter: LogprobFormatter, top: int | None, usage: bool,
        token_fields: TokenFields,
    ) -> None:  # fmt: skip
        self._token_fields = token_fields
        self._output, self._logprob_formatter, self._top, self._usage = output, logprob_formatter, top, usage
        self._common_fields = {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
        }
        self._common_fields["model"] = model
        self._num_calls = 0

    def start_events(self) -> bytes:
        """Returns the first chunk, which contains the role."""
        return self._chunk({"role": "assistant", "content": ""}, **self._token_fields.of_prompt(self._output.prompt))

    def delta_events(self, delta: OutputDelta) -> bytes:
        """Returns the chunk of one round; empty if the round adds nothing visible."""
        fields: dict[str, Any] = {}
        if delta.reasoning_text:
            fields["reasoning_content"] = delta.reasoning_text
        if delta.content or not (delta.reasoning_text or delta.tool_calls):
            fields["content"] = delta.content
        if delta.tool_calls:
            fields["tool_calls"] = [
                {"index": self._num_calls + index, **openai_tool_call(call)}
                for index, call in enumerate(delta.tool_calls)
            ]
            self._num_calls += len(delta.tool_calls)
        if self._top is None and fields == {"content": ""} and not self._token_fields.token_ids:
            return b""
        tokens = self._output.tokens[delta.first_token : delta.end_token]
        logprobs = self._logprobs(delta.first_token, delta.end_token)
        return self._chunk(fields, logprobs=logprobs, choice_fields=self._token_fields.of_output(tokens))

    def end_events(self) -> bytes:
        """Returns the last chunks: finish reason, usage and statistics."""
        output = self._output
        stats = output.stats()
        stop_reason = {"stop_reason": output.stop_reason}
        last = self._chunk({}, output.finish_reason, choice_fields=stop_reason, **({} if self._usage else stats))
        if self._usage:
            last += sse_event({**self._common_fields, "choices": [], "usage": output.usage(), **stats})
        return last + DONE_EVENT

    def full_response(self) -> dict[str, Any]:
        """Returns the complete response."""
        output = self._output
        logprobs = self._logprobs(0, len(output.tokens))
        choices = [
            {"index": index, "message": assistant_message(choice), "logprobs": logprobs, "finish_reason":
            choice.finish_reason,
             **choice_end_fields(choice), **self._token_fields.of_output(choice.tokens)}
            for index, choice in enumerate(output.choices)
        ]  # fmt: skip
        head = {**self._common_fields, "object": "chat.completion"}
        prompt_fields = self._token_fields.of_prompt(output.prompt, output.prompt_logprobs)
        return {**head, "choices": choices, "usage": output.usage(), **prompt_fields, **output.stats()}

    def _logprobs(self, first: int, last: int) -> dict[str, Any] | None:
        if self._top is None:
            return None
        output = self._output
        items = self._logprob_formatter.chat_logprobs(output.tokens[first:last], output.logprobs[first:last], self._top)
        return {"content": items, "refusal": None}

    def _chunk(
        self, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None, *,
        choice_fields: Mapping[str, Any] | None = None, **more: Any,
    ) -> bytes:  # fmt: skip
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish, **(choice_fields or {})}
        usage = self._token_fields.of_chunk(self._output.usage)
        return sse_event({**self._common_fields, "choices": [choice], **usage, **more})


def chat_router(context: AppContext) -> APIRouter:
    """Returns the router of /v1/chat/completions."""
    router = APIRouter()

    @router.post("/v1/chat/completions", responses=JSON_OR_SSE)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        _, codec = context.require_ready()
        model = context.resolve_model_name(body.model)
        reject_unsupported(body)
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs to be true", "top_logprobs")
        top = (body.top_logprobs or 0) if body.logprobs else None
        limit = body.max_completion_tokens or body.max_tokens
        generation_request = await chat_generation_request(
            context, request, body, chat_to_conversation(body), limit=limit, stops=stop_list(body.stop),
            grammar=grammar_request(body), logprobs=top,
            choices=requested_choices(body, body.n, body.stream, context.require_ready()[0]), scoring=body,
            stream=body.stream,
        )  # fmt: skip
        usage = context.always_usage or bool(body.stream_options and body.stream_options.include_usage)
        output = GenerationOutput.create(generation_request, codec)
        formatter = LogprobFormatter(codec, bool(body.return_tokens_as_token_ids))
        token_fields = response_fields(body, body.stream_options, formatter)
        writer = ChatWriter(output, model, formatter, listed_logprobs(body, top), usage, token_fields)
        return await respond(context, request, output, writer, body.stream)

    return router
