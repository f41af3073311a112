"""Endpoint /v1/chat/completions: OpenAI's chat completions."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from swiftspec.serve.http.api.generation import JSON_OR_SSE, chat_generation_request, respond
from swiftspec.serve.http.api.sampling import grammar_request, requested_choices
from swiftspec.serve.http.app_context import AppContext, new_id
from swiftspec.serve.http.errors import ApiError
from swiftspec.serve.http.format.conversation import (
    Conversation,
    Message,
    NamedTool,
    TemplateFields,
    Tool,
    ToolChoice,
)
from swiftspec.serve.http.format.generation_output import (
    GenerationOutput,
    OutputDelta,
    OutputPiece,
    choice_end_fields,
)
from swiftspec.serve.http.format.logprobs import LogprobFormatter
from swiftspec.serve.http.format.tools import ParsedToolCall
from swiftspec.serve.http.schema import (
    CHAT_UNSUPPORTED,
    INTEGRAL,
    ConstraintFields,
    Count,
    JsonObject,
    Positive,
    SamplingFields,
    ShortText,
    Stop,
    Stops,
    StreamOptions,
    StreamUsage,
    Text,
    reject_unsupported,
    stream_usage,
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
    n: Count | None = Field(None, description="With smc: number of texts of the population, each with its weight.")
    echo: bool | None = Field(
        None, description="Begin the answer with the text of the last message, if that has the same role."
    )
    # Fields of OpenAI or vLLM that this server does not support: see CHAT_UNSUPPORTED.
    audio: JsonObject | None = None
    modalities: Annotated[list[ShortText], Field(max_length=8)] | None = None
    functions: Annotated[list[Any], Field(max_length=128)] | None = None
    function_call: ShortText | JsonObject | None = None
    chat_template: Text | None = None
    documents: Annotated[list[Any], Field(max_length=4096)] | None = None
    web_search_options: JsonObject | None = None


def chat_to_conversation(body: ChatRequest) -> Conversation:
    """Converts a request to a conversation for the chat template. Raises ApiError on content that is not text."""
    choice = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else body.tool_choice or "auto"
    return body.to_conversation(body.messages, body.tools, choice, body.parallel_tool_calls is False)


def response_role(body: ChatRequest) -> str:
    """Returns the role of the answer: the assistant's, or without a generation prompt that of the last message, as in
    vLLM."""
    return body.messages[-1].role if body.add_generation_prompt is False else "assistant"


def echoed_text(body: ChatRequest, conversation: Conversation) -> str:
    """Returns the text that precedes the answer with `echo`: that of the last message if it has the role of the
    answer, as in vLLM."""
    last = conversation.messages[-1]
    return last["content"] if body.echo and last["role"] == response_role(body) else ""


def stop_list(stop: str | list[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else stop or []


def openai_tool_call(call: ParsedToolCall) -> dict[str, Any]:
    """Returns a tool call in OpenAI's schema."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}


def answer_message(output: GenerationOutput, role: str = "assistant", echo: str = "") -> dict[str, Any]:
    """Returns the complete message. `echo`: text that precedes the generated content."""
    content = echo + output.content
    message: dict[str, Any] = {"role": role, "content": content, "refusal": None}
    if output.tool_calls:
        message |= {
            "content": content or None,
            "tool_calls": [openai_tool_call(call) for call in output.tool_calls],
        }
    if output.reasoning_text:
        message["reasoning_content"] = output.reasoning_text
    return message


class ChatWriter:
    """Formatter of a generation as a response of OpenAI's chat completions endpoint.

    `top`: number of top log-probabilities per token; None: no log-probabilities.
    `usage`: the usage that a stream contains.
    `role`: role of the answer.
    `echo`: text that precedes the generated content.
    """

    def __init__(
        self, output: GenerationOutput, model: str, logprob_formatter: LogprobFormatter, top: int | None,
        usage: StreamUsage, fingerprint: str, role: str = "assistant", echo: str = "",
    ) -> None:  # fmt: skip
        self._output, self._logprob_formatter, self._top, self._usage = output, logprob_formatter, top, usage
        self._role, self._echo = role, echo
        self._common_fields = {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
        }
        self._common_fields |= {"model": model, "system_fingerprint": fingerprint}
        self._num_calls = 0

    def start_events(self) -> bytes:
        """Returns the first chunk, which contains the role, and a chunk with the echoed text."""
        first = self._chunk({"role": self._role, "content": ""}, end_token=0)
        return first + (self._chunk({"content": self._echo}, end_token=0) if self._echo else b"")

    def delta_events(self, delta: OutputDelta) -> bytes:
        """Returns a chunk for each piece of the round, in their order; without log-probabilities nothing if the round
        adds nothing visible. Clients read either content or tool calls in one chunk."""
        out, first_token = b"", delta.first_token
        for index, piece in enumerate(delta.pieces, 1):
            end_token = delta.end_token if index == len(delta.pieces) else piece.end_token
            logprobs = self._logprobs(first_token, end_token)
            out += self._chunk(self._delta_fields(piece), logprobs=logprobs, end_token=end_token)
            first_token = end_token
        if delta.pieces or self._top is None:
            return out
        logprobs = self._logprobs(delta.first_token, delta.end_token)
        return self._chunk({"content": ""}, logprobs=logprobs, end_token=delta.end_token)

    def _delta_fields(self, piece: OutputPiece) -> dict[str, Any]:
        if piece.tool_call is None:
            return {"content" if piece.kind == "content" else "reasoning_content": piece.text}
        self._num_calls += 1
        return {"tool_calls": [{"index": self._num_calls - 1, **openai_tool_call(piece.tool_call)}]}

    def end_events(self) -> bytes:
        """Returns the last chunks: finish reason, usage and statistics."""
        output = self._output
        stats = output.stats()
        last = self._chunk(
            {}, output.finish_reason, stop_reason=output.text_builder.stop_string,
            end_token=len(output.tokens), **({} if self._usage.at_end else stats),
        )  # fmt: skip
        if self._usage.at_end:
            last += sse_event({**self._common_fields, "choices": [], "usage": output.usage(), **stats})
        return last + DONE_EVENT

    def full_response(self) -> dict[str, Any]:
        """Returns the complete response."""
        output = self._output
        logprobs = self._logprobs(0, len(output.tokens))
        choices = [
            {"index": index, "message": answer_message(choice, self._role, self._echo), "logprobs": logprobs,
             "finish_reason": choice.finish_reason, **choice_end_fields(choice)}
            for index, choice in enumerate(output.choices)
        ]  # fmt: skip
        head = {**self._common_fields, "object": "chat.completion"}
        return {**head, "choices": choices, "usage": output.usage(), **output.stats()}

    def _logprobs(self, first: int, last: int) -> dict[str, Any] | None:
        if self._top is None:
            return None
        output = self._output
        items = self._logprob_formatter.chat_logprobs(output.tokens[first:last], output.logprobs[first:last], self._top)
        return {"content": items, "refusal": None}

    def _chunk(
        self, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None, *, end_token: int, **more: Any
    ) -> bytes:
        """Returns a chunk. `end_token`: number of output tokens so far."""
        if self._usage.in_chunks:
            more["usage"] = self._output.usage_so_far(end_token)
        stop = {"stop_reason": more.pop("stop_reason")} if "stop_reason" in more else {}
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish, **stop}
        return sse_event({**self._common_fields, "choices": [choice], **more})


def chat_router(context: AppContext) -> APIRouter:
    """Returns the router of /v1/chat/completions."""
    router = APIRouter()

    @router.post("/v1/chat/completions", responses=JSON_OR_SSE)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        _, codec = context.require_ready()
        model = context.resolve_model_name(body.model)
        reject_unsupported(body, CHAT_UNSUPPORTED)
        usage = stream_usage(body.stream, body.stream_options, context.always_usage)
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs to be true", "top_logprobs")
        top = (body.top_logprobs or 0) if body.logprobs else None
        limit = body.max_completion_tokens or body.max_tokens
        conversation = chat_to_conversation(body)
        generation_request = await chat_generation_request(
            context, request, body, conversation, limit=limit, stops=stop_list(body.stop),
            grammar=grammar_request(body), logprobs=top,
            choices=requested_choices(body, body.n, body.stream, context.require_ready()[0]),
        )  # fmt: skip
        output = GenerationOutput.create(generation_request, codec)
        writer = ChatWriter(
            output, model, LogprobFormatter(codec), top, usage, context.system_fingerprint(),
            response_role(body), echoed_text(body, conversation),
        )  # fmt: skip
        return await respond(context, request, output, writer, body.stream)

    return router
