"""Endpoint /v1/chat/completions: OpenAI's chat completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from swiftspec.serve.api.generation import JSON_OR_SSE, chat_generation_request, respond
from swiftspec.serve.api.sampling import grammar_request, stop_list
from swiftspec.serve.api.token_fields import (
    check_logprob_size,
    listed_logprobs,
    logprob_formatter,
    response_fields,
)
from swiftspec.serve.app_context import AppContext, new_id
from swiftspec.serve.errors import check_request_fields
from swiftspec.serve.format.conversation import (
    Conversation,
    Message,
    NamedTool,
    TemplateFields,
    Tool,
    ToolChoice,
)
from swiftspec.serve.format.generation_output import (
    GenerationOutput,
    OutputDelta,
    OutputPiece,
    RequestOutputs,
)
from swiftspec.serve.format.logprobs import LogprobFormatter, TokenFields
from swiftspec.serve.format.tool_parser import ParsedToolCall
from swiftspec.serve.known_fields import reject_unsupported
from swiftspec.serve.openai.choice_writer import ChoiceWriter
from swiftspec.serve.openai.choices import requested_choices, sampled_requests
from swiftspec.serve.schema import (
    N_DESCRIPTION,
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
    StreamUsage,
    stream_usage,
)


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
    n: Count | None = Field(None, description=N_DESCRIPTION)
    include_reasoning: bool | None = Field(None, description="false: the answer has no reasoning.")
    echo: bool | None = Field(
        None, description="Begin the answer with the text of the last message, if that has the same role."
    )


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
    echoes = body.echo and body.messages[-1].role == response_role(body)
    return conversation.messages[-1]["content"] if echoes else ""


def openai_tool_call(call: ParsedToolCall) -> dict[str, Any]:
    """Returns a tool call in OpenAI's schema."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}


def _reasoning_fields(text: str) -> dict[str, str]:
    """Returns the reasoning under the name of DeepSeek and llama.cpp and under that of vLLM."""
    return {"reasoning_content": text, "reasoning": text}


def answer_message(
    output: GenerationOutput, role: str = "assistant", echo: str = "", *, with_reasoning: bool = True
) -> dict[str, Any]:
    """Returns the complete message. `echo`: text that precedes the generated content."""
    content = echo + output.content
    message: dict[str, Any] = {"role": role, "content": content, "refusal": None}
    if output.tool_calls:
        message |= {
            "content": content or None,
            "tool_calls": [openai_tool_call(call) for call in output.tool_calls],
        }
    if output.reasoning_text and with_reasoning:
        message |= _reasoning_fields(output.reasoning_text)
    return message


class ChatWriter(ChoiceWriter):
    """Formatter of the outputs of a request as a response of OpenAI's chat completions endpoint.

    `top`: number of top log-probabilities per token; None: no log-probabilities.
    `role`: role of the answer.
    `echo`: text that precedes the generated content.
    `token_fields`: formatter of vLLM's additional fields.
    `with_reasoning`: whether the response contains the reasoning.
    """

    def __init__(
        self,
        outputs: RequestOutputs,
        model: str,
        logprob_formatter: LogprobFormatter,
        top: int | None,
        usage: StreamUsage,
        fingerprint: str,
        token_fields: TokenFields,
        role: str = "assistant",
        echo: str = "",
        with_reasoning: bool = True,
    ) -> None:
        common_fields = {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        super().__init__(outputs, usage, common_fields, top is not None or token_fields.has_prompt_logprobs)
        self._logprob_formatter, self._top = logprob_formatter, top
        self._role, self._echo, self._token_fields = role, echo, token_fields
        self._with_reasoning = with_reasoning
        self._num_calls: dict[int, int] = {}  # tool calls so far, by choice that has begun

    def delta_events(self, delta: OutputDelta) -> bytes:
        """Returns a chunk for each piece of the round, in their order, because clients read either content or tool
        calls in one chunk. Chunks with the role and the echoed text precede the first round of a choice. The last delta
        of a choice becomes the chunk with the finish reason. Returns nothing if the round adds nothing to the response,
        or if the response is not a stream."""
        if not self._streaming:
            return b""
        choice, out = delta.choice, b""
        if choice not in self._num_calls:
            self._num_calls[choice] = 0
            prompt_fields = self._token_fields.prompt_chunk(self._outputs.outputs[choice].prompt)
            out = self._chunk(choice, {"delta": {"role": self._role, "content": ""}}, 0, more=prompt_fields)
            out += self._chunk(choice, {"delta": {"content": self._echo}}, 0) if self._echo else b""
        if delta.last:
            return out + self._end_chunk(choice, {"delta": {}})
        pieces = [piece for piece in delta.pieces if self._with_reasoning or piece.kind != "reasoning"]
        if not pieces and (self._top is not None or self._token_fields.token_ids):
            return out + self._token_chunk(choice, {"content": ""}, delta.first_token, delta.end_token)
        return out + self._piece_chunks(delta, pieces)

    def _piece_chunks(self, delta: OutputDelta, pieces: Sequence[OutputPiece]) -> bytes:
        out, first_token = b"", delta.first_token
        for index, piece in enumerate(pieces, 1):
            end_token = delta.end_token if index == len(pieces) else piece.end_token
            fields = self._delta_fields(delta.choice, piece)
            out += self._token_chunk(delta.choice, fields, first_token, end_token)
            first_token = end_token
        return out

    def _token_chunk(self, choice: int, fields: dict[str, Any], first_token: int, end_token: int) -> bytes:
        """Returns a chunk with these output tokens."""
        output = self._outputs.outputs[choice]
        logprobs = self._logprobs(output, first_token, end_token)
        token_fields = self._token_fields.output_chunk(output.tokens[first_token:end_token])
        return self._chunk(choice, {"delta": fields}, end_token, logprobs, token_fields)

    def _delta_fields(self, choice: int, piece: OutputPiece) -> dict[str, Any]:
        if piece.tool_call is None:
            return {"content": piece.text} if piece.kind == "content" else _reasoning_fields(piece.text)
        self._num_calls[choice] += 1
        return {"tool_calls": [{"index": self._num_calls[choice] - 1, **openai_tool_call(piece.tool_call)}]}

    def full_response(self) -> dict[str, Any]:
        """Returns the complete response."""
        outputs = self._outputs
        choices = [
            {
                "index": index,
                "message": answer_message(choice, self._role, self._echo, with_reasoning=self._with_reasoning),
                "logprobs": self._logprobs(choice, 0, len(choice.tokens)),
                "finish_reason": choice.finish_reason,
                **outputs.choice_end_fields(choice),
                **self._token_fields.whole_output(choice.tokens),
            }
            for index, choice in outputs.choices()
        ]
        head = {**self._common_fields, "object": "chat.completion"}
        first = outputs.outputs[0]
        prompt_fields = self._token_fields.whole_prompt(first.prompt, first.prompt_logprobs)
        return {**head, "choices": choices, "usage": outputs.usage(), **prompt_fields, **outputs.stats()}

    def _logprobs(self, output: GenerationOutput, first: int, last: int) -> dict[str, Any] | None:
        if self._top is None:
            return None
        items = self._logprob_formatter.chat_logprobs(output.tokens[first:last], output.logprobs[first:last], self._top)
        return {"content": items, "refusal": None}


def chat_router(context: AppContext) -> APIRouter:
    """Returns the router of /v1/chat/completions."""
    router = APIRouter()

    @router.post("/v1/chat/completions", responses=JSON_OR_SSE)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        info, codec = context.require_ready()
        model = context.resolve_model_name(body.model)
        reject_unsupported(body)
        usage = stream_usage(body.stream, body.stream_options, context.always_usage)
        choices = requested_choices(body, body.n, body.stream, info)
        if body.top_logprobs and not body.logprobs:
            check_request_fields("top_logprobs", "top log-probabilities", "no log-probabilities")
        top = (body.top_logprobs or 0) if body.logprobs else None
        limit = body.max_completion_tokens or body.max_tokens
        conversation = chat_to_conversation(body)
        generation_request = await chat_generation_request(
            context,
            request,
            body,
            conversation,
            limit=limit,
            stops=stop_list(body.stop),
            grammar=grammar_request(body),
            logprobs=top,
            choices=choices.population,
            scoring=body,
            stream=body.stream,
            keep_cut_call=True,
        )
        requests = sampled_requests(generation_request, choices.num_samples, body.seed is not None)
        check_logprob_size(body, info, requests)
        outputs = RequestOutputs.create([requests], codec, choices.n)
        formatter = logprob_formatter(body, codec)
        writer = ChatWriter(
            outputs=outputs,
            model=model,
            logprob_formatter=formatter,
            top=listed_logprobs(body, top),
            usage=usage,
            fingerprint=context.system_fingerprint(),
            token_fields=response_fields(body, formatter),
            role=response_role(body),
            echo=echoed_text(body, conversation),
            with_reasoning=body.include_reasoning is not False,
        )
        return await respond(context, request, outputs, writer, body.stream)

    return router
