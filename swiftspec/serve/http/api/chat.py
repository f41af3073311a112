"""/v1/chat/completions."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from swiftspec.serve.http.api.generation import BOTH_WAYS, chat_job, respond
from swiftspec.serve.http.api.sampling import choices_asked, grammar_asked
from swiftspec.serve.http.app_context import Server, number
from swiftspec.serve.http.errors import ApiError
from swiftspec.serve.http.format.answer import Answer, Part, ended_by
from swiftspec.serve.http.format.conversation import (
    Message,
    NamedTool,
    Talked,
    TemplateFields,
    Tool,
    ToolChoice,
    talk_of,
)
from swiftspec.serve.http.format.logprobs import Scores
from swiftspec.serve.http.format.tools import Call
from swiftspec.serve.http.schema import (
    CHAT_NEVER,
    WHOLE,
    Constrained,
    Count,
    Object,
    Positive,
    Sampled,
    Stop,
    Stops,
    StreamOptions,
    Text,
    Word,
    refuse,
)
from swiftspec.serve.http.sse import DONE, event


class ChatRequest(Sampled, Constrained, TemplateFields):
    """OpenAI's, with vLLM's sampling parameters."""

    model: Word | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    stop: Stop | Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    n: Count | None = Field(None, description="With smc: so many texts of the population, each with its weight.")
    # What OpenAI or vLLM has and this server does not: see CHAT_NEVER.
    audio: Object | None = None
    modalities: Annotated[list[Word], Field(max_length=8)] | None = None
    functions: Annotated[list[Any], Field(max_length=128)] | None = None
    function_call: Word | Object | None = None
    chat_template: Text | None = None
    documents: Annotated[list[Any], Field(max_length=4096)] | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    web_search_options: Object | None = None


def talked_of(body: ChatRequest) -> Talked:
    """The conversation and its tools, for the chat template."""
    tools = [one.shown() for one in body.tools or ()]
    choice = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else body.tool_choice or "auto"
    return Talked(
        talk_of(body.messages), tools, choice, body.variables(), bool(body.continue_final_message),
        body.parallel_tool_calls is False,
    )  # fmt: skip


def stops_of(stop: str | list[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else stop or []


def called(call: Call) -> dict[str, Any]:
    """A call in OpenAI's shape."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def message_of(answer: Answer) -> dict[str, Any]:
    """The assistant's message, whole."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.said, "refusal": None}
    if answer.calls:
        message |= {"content": answer.said or None, "tool_calls": [called(call) for call in answer.calls]}
    if answer.thought:
        message["reasoning_content"] = answer.thought
    return message


class ChatWriter:
    """An answer in the shape of chat completions. `top`: so many likeliest tokens with each; None: no likelihoods."""

    def __init__(self, answer: Answer, model: str, scores: Scores, top: int | None, usage: bool) -> None:
        self._answer, self._scores, self._top, self._usage = answer, scores, top, usage
        self._head = {"id": number("chatcmpl-"), "object": "chat.completion.chunk", "created": int(time.time())}
        self._head["model"] = model
        self._calls = 0

    def begin(self) -> bytes:
        """The role."""
        return self._chunk({"role": "assistant", "content": ""})

    def part(self, part: Part) -> bytes:
        """One chunk."""
        delta: dict[str, Any] = {}
        if part.thought:
            delta["reasoning_content"] = part.thought
        if part.said or not (part.thought or part.calls):
            delta["content"] = part.said
        if part.calls:
            delta["tool_calls"] = [{"index": self._calls + at, **called(call)} for at, call in enumerate(part.calls)]
            self._calls += len(part.calls)
        if self._top is None and delta == {"content": ""}:
            return b""
        return self._chunk(delta, logprobs=self._logprobs(part.first, part.last))

    def end(self) -> bytes:
        """What ended it; usage and cost."""
        answer = self._answer
        cost = answer.cost()
        last = self._chunk({}, answer.finish_reason, stop_reason=answer.builder.stop, **({} if self._usage else cost))
        if self._usage:
            last += event({**self._head, "choices": [], "usage": answer.usage(), **cost})
        return last + DONE

    def whole(self) -> dict[str, Any]:
        """As one object."""
        answer = self._answer
        logprobs = self._logprobs(0, len(answer.tokens))
        choices = [
            {"index": at, "message": message_of(each), "logprobs": logprobs, "finish_reason": each.finish_reason,
             **ended_by(each)}
            for at, each in enumerate(answer.choices)
        ]  # fmt: skip
        head = {**self._head, "object": "chat.completion"}
        return {**head, "choices": choices, "usage": answer.usage(), **answer.cost()}

    def _logprobs(self, first: int, last: int) -> dict[str, Any] | None:
        if self._top is None:
            return None
        answer = self._answer
        items = self._scores.chat(answer.tokens[first:last], answer.likelihoods[first:last], self._top)
        return {"content": items, "refusal": None}

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None, **more: Any) -> bytes:
        stop = {"stop_reason": more.pop("stop_reason")} if "stop_reason" in more else {}
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish, **stop}
        return event({**self._head, "choices": [choice], **more})


def router(server: Server) -> APIRouter:
    """The endpoint."""
    made = APIRouter()

    @made.post("/v1/chat/completions", responses=BOTH_WAYS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        _, codec = server.ready()
        model = server.name(body.model)
        refuse(body, CHAT_NEVER)
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs to be true", "top_logprobs")
        top = (body.top_logprobs or 0) if body.logprobs else None
        limit = body.max_completion_tokens or body.max_tokens
        job = await chat_job(
            server, request, body, talked_of(body), limit=limit, stops=stops_of(body.stop),
            grammar=grammar_asked(body), logprobs=top,
            choices=choices_asked(body, body.n, body.stream, server.ready()[0]),
        )  # fmt: skip
        usage = server.always_usage or bool(body.stream_options and body.stream_options.include_usage)
        answer = Answer.of(job, codec)
        writer = ChatWriter(answer, model, Scores(codec), top, usage)
        return await respond(server, request, answer, writer, body.stream)

    return made
