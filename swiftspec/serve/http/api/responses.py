"""Endpoint /v1/responses: OpenAI's Responses API without stored state: each request contains the whole conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from swiftspec.serve.http.api.generation import JSON_OR_SSE, chat_generation_request, respond
from swiftspec.serve.http.api.responses_writer import ResponsesWriter
from swiftspec.serve.http.api.sampling import GrammarRequest, grammar_request
from swiftspec.serve.http.app_context import AppContext
from swiftspec.serve.http.errors import ApiError, unsupported
from swiftspec.serve.http.format.conversation import (
    Content,
    Conversation,
    Name,
    TemplateMessages,
    content_text,
    parse_arguments,
    template_tool,
    template_tool_call,
)
from swiftspec.serve.http.format.generation_output import GenerationOutput
from swiftspec.serve.http.format.logprobs import LogprobFormatter
from swiftspec.serve.http.known_fields import reject_unsupported
from swiftspec.serve.http.schema import (
    INTEGRAL,
    Body,
    ConstraintFields,
    JsonObject,
    JsonSchema,
    Positive,
    ResponseFormat,
    SamplingFields,
    ShortText,
    Text,
    Variables,
)
from swiftspec.serve.http.sse import ENCODER

LOGPROBS = "message.output_text.logprobs"


class Item(Body):
    """An input item: a message (`role`, `content`), function_call, function_call_output or reasoning."""

    type: ShortText | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    call_id: ShortText | None = None
    name: Name | None = None
    arguments: Text | None = None
    output: Content | None = None


class ResponseTool(Body):
    type: ShortText
    name: Name | None = None
    description: Text | None = None
    parameters: JsonObject | None = None


class ChosenTool(Body):
    type: Literal["function"]
    name: Name


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Body):
    format: TextFormat | None = None


class ReasoningOptions(Body):
    effort: Annotated[str, Field(max_length=32)] | None = None


class ResponsesRequest(SamplingFields, ConstraintFields):
    """Request of OpenAI's responses endpoint, with vLLM's sampling parameters."""

    model: ShortText | None = None
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=4096)]
    instructions: Text | None = None
    max_output_tokens: Positive | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), INTEGRAL] | None = None
    include: Annotated[list[ShortText], Field(max_length=32)] | None = None
    metadata: Annotated[dict[str, Any], Field(max_length=16)] | None = None
    chat_template_kwargs: Variables | None = None


def responses_to_template_messages(body: ResponsesRequest) -> TemplateMessages:
    """Converts the input to the messages that chat templates take. Raises ApiError on an unsupported item."""
    template_messages: TemplateMessages = []
    if body.instructions:
        template_messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*template_messages, {"role": "user", "content": body.input}]
    reasoning = ""
    for index, item in enumerate(body.input):
        field_path = f"input.{index}"
        kind = item.type or "message"
        if kind == "reasoning":
            reasoning = "" if item.content is None else _reasoning_text(item)
            continue
        if kind == "function_call":
            _add_call(template_messages, item, field_path)
        elif kind == "function_call_output":
            template_messages.append(
                {"role": "tool", "tool_call_id": item.call_id, "content": content_text(item.output, field_path)}
            )
        elif kind == "message" and item.role is not None:
            role = "system" if item.role == "developer" else item.role
            template_messages.append({"role": role, "content": content_text(item.content, f"{field_path}.content")})
        else:
            raise unsupported(field_path, f"unsupported item of type {kind[:40]!r}, or a message without a role")
        if reasoning and template_messages[-1]["role"] == "assistant":
            template_messages[-1]["reasoning_content"] = reasoning
        reasoning = ""
    return template_messages


def _reasoning_text(item: Item) -> str:
    if isinstance(item.content, str):
        return item.content
    return "".join(part.text or "" for part in item.content or ())


def _add_call(template_messages: TemplateMessages, item: Item, field_path: str) -> None:
    """Appends a function_call item to the preceding assistant message, or to a new one if the preceding message is not
    the assistant's. Raises ApiError if the item has no name or invalid arguments."""
    if item.name is None:
        raise ApiError(400, f"{field_path}.name: required in a function_call", f"{field_path}.name")
    call = template_tool_call(item.call_id, item.name, parse_arguments(item.arguments or "", f"{field_path}.arguments"))
    if not template_messages or template_messages[-1]["role"] != "assistant":
        template_messages.append({"role": "assistant", "content": None})
    template_messages[-1].setdefault("tool_calls", []).append(call)


def responses_to_conversation(body: ResponsesRequest) -> Conversation:
    """Converts a request to a conversation for the chat template. Raises ApiError on an unsupported tool or item."""
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(body.tools or ()):
        if tool.type != "function" or tool.name is None:
            raise unsupported(
                f"tools.{index}", f"unsupported tool of type {tool.type[:40]!r}, or a function without a name"
            )
        tools.append(template_tool(tool.name, tool.description, tool.parameters))
    tool_choice = body.tool_choice
    choice = tool_choice.name if isinstance(tool_choice, ChosenTool) else tool_choice or "auto"
    effort = {} if body.reasoning is None or body.reasoning.effort is None else body.reasoning.model_dump()
    variables = {f"reasoning_{name}": value for name, value in effort.items()} | (body.chat_template_kwargs or {})
    return Conversation(
        responses_to_template_messages(body),
        tools,
        choice,
        variables,
        single_tool_call=body.parallel_tool_calls is False,
    )


def responses_grammar_request(body: ResponsesRequest) -> GrammarRequest | None:
    """As `grammar_request`, but a format in `text.format`, which only this endpoint has, replaces `response_format`."""
    text_format = None if body.text is None else body.text.format
    if text_format is None:
        return grammar_request(body)
    schema = text_format if text_format.type == "json_schema" else None
    response_format = ResponseFormat.model_construct(type=text_format.type, json_schema=schema)
    grammar = grammar_request(body.model_copy(update={"response_format": response_format}))
    if grammar is None or grammar[2] != "response_format":
        return grammar
    return grammar[0], grammar[1], "text.format"


def responses_router(context: AppContext) -> APIRouter:
    """Returns the router of /v1/responses."""
    router = APIRouter()

    @router.post("/v1/responses", responses=JSON_OR_SSE)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        _, codec = context.require_ready()
        model = context.resolve_model_name(body.model)
        reject_unsupported(body, ["best_of"])
        top = body.top_logprobs or 0 if body.top_logprobs or LOGPROBS in (body.include or ()) else None
        generation_request = await chat_generation_request(
            context, request, body, responses_to_conversation(body), limit=body.max_output_tokens,
            grammar=responses_grammar_request(body),
            logprobs=top,
        )  # fmt: skip
        output = GenerationOutput.create(generation_request, codec)
        sampling = generation_request.engine_request.sampling
        echoed_fields = {
            "instructions": body.instructions, "metadata": body.metadata or {}, "model": model,
            "temperature": sampling.get("temperature", 1.0), "top_p": sampling.get("top_p", 1.0),
            "max_output_tokens": body.max_output_tokens, "previous_response_id": None,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "tool_choice": "auto" if body.tool_choice is None else _plain(body.tool_choice),
            "tools": [{"strict": False, **_plain(tool)} for tool in body.tools or ()],
            "text": {"format": {"type": "text"}} if body.text is None else _plain(body.text),
            "reasoning": {} if body.reasoning is None else _plain(body.reasoning),
            "truncation": "disabled", "store": False, "background": False,
        }  # fmt: skip
        ENCODER.encode(echoed_fields)  # raises on an unpaired surrogate before the engine gets the request
        writer = ResponsesWriter(output, echoed_fields, LogprobFormatter(codec), top)
        return await respond(context, request, output, writer, body.stream)

    return router


def _plain(value: Body | str) -> Any:
    return value if isinstance(value, str) else value.model_dump(exclude_none=True, by_alias=True)
