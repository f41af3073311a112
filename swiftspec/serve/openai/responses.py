"""Endpoints /v1/responses and /v1/responses/input_tokens: OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from swiftspec.params import MAX_LOGPROBS, SamplingParams
from swiftspec.serve.api.generation import JSON_OR_SSE, chat_generation_request, encode_conversation, respond
from swiftspec.serve.api.sampling import GrammarRequest, grammar_request
from swiftspec.serve.api.token_fields import prompt_truncation
from swiftspec.serve.app_context import AppContext
from swiftspec.serve.errors import ApiError, unsupported
from swiftspec.serve.format.conversation import (
    CUSTOM_INPUT,
    Content,
    Conversation,
    Name,
    SentBody,
    TemplateMessages,
    content_text,
    parse_arguments,
    template_message,
    template_tool_call,
)
from swiftspec.serve.format.generation_output import GenerationOutput
from swiftspec.serve.format.logprobs import LogprobFormatter
from swiftspec.serve.known_fields import reject_unsupported
from swiftspec.serve.metrics.request_metrics import REQUEST_CONTEXT
from swiftspec.serve.openai.response_items import conversation_items, listed_items
from swiftspec.serve.openai.response_store import ResponseStore, StoredResponse
from swiftspec.serve.openai.responses_writer import ResponsesWriter
from swiftspec.serve.openai.stored_response_routes import NOT_FOUND
from swiftspec.serve.schema import (
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
from swiftspec.serve.sse import ENCODER

ITEM_REFERENCE = "item_reference"
FUNCTION_CALL, CALL, CALL_OUTPUT = "function_call", "_call", "_call_output"  # the latter two end types of items
LOGPROBS = "message.output_text.logprobs"


class Item(Body):
    """An input item: a message (`role`, `content`), function_call, function_call_output, reasoning, item_reference to
    an item of a stored response, or a call of another tool (custom_tool_call, local_shell_call, web_search_call, ...)
    that another server has sent."""

    id: ShortText | None = None
    type: ShortText | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    call_id: ShortText | None = None
    name: Name | None = None
    namespace: Name | None = None
    arguments: Text | None = None
    input: Text | None = Field(None, description="Of a custom_tool_call.")
    action: JsonObject | None = Field(None, description="Of a local_shell_call.")
    output: Content | None = None


class ResponseTool(SentBody):
    type: ShortText
    name: Name | None = None
    description: Text | None = None
    parameters: JsonObject | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128)] | None = Field(None, description="Of a namespace.")

    def to_template(self, namespace: str | None = None) -> JsonObject:
        """Returns the tool in the schema of chat completions, the form that chat templates take, with the fields that
        the client sent."""
        fields = {name: value for name, value in self.sent.items() if name != "type"}
        return {"type": "function", "function": fields | {"name": qualified_name(namespace, self.name or "")}}


class ChosenTool(Body):
    type: Literal["function"]
    name: Name
    namespace: Name | None = None


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[JsonObject], Field(max_length=128)]


def qualified_name(namespace: str | None, name: str) -> str:
    """Returns the name of a tool as the model knows it."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Body):
    format: TextFormat | None = None


class ReasoningOptions(Body):
    effort: Annotated[str, Field(max_length=32)] | None = None


class ResponsesRequest(SamplingFields, ConstraintFields):
    """Request of OpenAI's responses endpoint, with vLLM's sampling parameters. The class is flat, since a request is
    one JSON object with all of them."""

    model: ShortText | None = None
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=4096)]
    instructions: Text | None = None
    max_output_tokens: Positive | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Annotated[list[ShortText], Field(max_length=32)] | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: as truncate_prompt_tokens -1, unless that is set."
    )
    metadata: Annotated[dict[str, Any], Field(max_length=16)] | None = None
    chat_template_kwargs: Variables | None = None
    store: bool | None = Field(None, description="Whether the response can be retrieved later; by default it can.")
    previous_response_id: ShortText | None = Field(
        None, description="A stored response, whose input and output precede the input."
    )


def responses_to_template_messages(body: ResponsesRequest) -> TemplateMessages:
    """Converts the input to the messages that chat templates take. Raises ApiError on an unsupported item."""
    template_messages: TemplateMessages = []
    if body.instructions:
        template_messages.append(template_message("system", body.instructions))
    if isinstance(body.input, str):
        return [*template_messages, template_message("user", body.input)]
    reasoning = ""
    for index, item in enumerate(body.input):
        field_path = f"input.{index}"
        kind = item.type or "message"
        if kind == "reasoning":
            reasoning = "" if item.content is None else _reasoning_text(item)
            continue
        if kind.endswith(CALL):
            if kind == FUNCTION_CALL or item.call_id is not None:  # the others were executed by the server
                _add_call(template_messages, item, field_path)
        elif kind.endswith(CALL_OUTPUT):
            text = content_text(item.output, field_path, is_tool_result=True)
            template_messages.append(template_message("tool", text, tool_call_id=item.call_id))
        elif kind == "message" and item.role is not None:
            text = content_text(item.content, f"{field_path}.content")
            template_messages.append(template_message(item.role, text))
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
    """Appends a call to the preceding assistant message, or to a new one if the preceding message is not the
    assistant's. Raises ApiError if a function_call has no name."""
    kind = item.type or ""
    if item.name is None and kind == FUNCTION_CALL:
        raise ApiError(400, f"{field_path}.name: required in a function_call", f"{field_path}.name")
    name = qualified_name(item.namespace, item.name or kind.removesuffix(CALL))
    arguments = item.action or {}
    if item.input is not None:
        arguments = {CUSTOM_INPUT: item.input}
    elif item.arguments is not None:
        arguments = parse_arguments(item.arguments)
    call = template_tool_call(item.call_id, name, arguments)
    if not template_messages or template_messages[-1]["role"] != "assistant":
        template_messages.append(template_message("assistant", ""))
    template_messages[-1].setdefault("tool_calls", []).append(call)


def functions(body: ResponsesRequest) -> Iterator[tuple[str | None, ResponseTool]]:
    """Yields the functions among the tools of a request, each with its namespace. Raises ApiError if one has no
    name."""
    for index, tool in enumerate(body.tools or ()):
        namespace = tool.name if tool.type == "namespace" else None
        for each in (tool.tools or ()) if namespace else (tool,):
            if each.type != "function":
                continue
            if each.name is None:
                raise ApiError(400, f"tools.{index}.name: required in a function", f"tools.{index}.name")
            yield namespace, each


def namespaces(body: ResponsesRequest) -> dict[str, tuple[str, str]]:
    """Returns namespace and name of the functions that have a namespace, by the name that the model knows."""
    named = [(namespace, tool.name) for namespace, tool in functions(body)]
    return {qualified_name(space, name): (space, name) for space, name in named if space and name}


def responses_to_conversation(body: ResponsesRequest) -> Conversation:
    """Converts a request to a conversation for the chat template. Tools that are not functions are passed over. Raises
    ApiError on an unsupported item."""
    tools = [tool.to_template(namespace) for namespace, tool in functions(body)]
    tool_choice = body.tool_choice
    choice: str = "auto"
    if isinstance(tool_choice, AllowedTools):
        choice = tool_choice.mode
        allowed = {qualified_name(each.get("namespace"), str(each.get("name"))) for each in tool_choice.tools}
        tools = [tool for tool in tools if tool["function"]["name"] in allowed]
    elif isinstance(tool_choice, ChosenTool):
        choice = qualified_name(tool_choice.namespace, tool_choice.name)
    elif tool_choice is not None:
        choice = tool_choice
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


def previous_items(body: ResponsesRequest, store: ResponseStore) -> list[dict[str, Any]]:
    """Returns the items of the previous response of a request, input and output; [] if it names none. Raises ApiError
    if that response is not stored."""
    field = "previous_response_id"
    if body.previous_response_id is None:
        return []
    previous = store.get(body.previous_response_id, REQUEST_CONTEXT.get().api_key)
    if previous is None:
        message = f"{field}: Previous response with id {body.previous_response_id[:100]!r} {NOT_FOUND}"
        raise ApiError(400, message, field, "previous_response_not_found")
    return conversation_items(previous)


def with_previous_items(body: ResponsesRequest, items: list[dict[str, Any]]) -> ResponsesRequest:
    """Returns the request with the items of its previous response before its input. Raises ApiError on an unsupported
    new item."""
    if not items:
        return body
    responses_to_template_messages(body)  # here an error has the index of the item in the request
    new_items = body.input
    if isinstance(new_items, str):
        new_items = [Item.model_validate({"role": "user", "content": new_items})]
    return body.model_copy(update={"input": [*map(Item.model_validate, items), *new_items]})


def with_truncation(body: ResponsesRequest) -> ResponsesRequest:
    """Returns the request with the value of `truncate_prompt_tokens` that `truncation` stands for."""
    if body.truncation != "auto" or body.truncate_prompt_tokens is not None:
        return body
    return body.model_copy(update={"truncate_prompt_tokens": -1})


def _is_reference(item: Item) -> bool:
    """Returns whether an item refers to a stored one. OpenAI's API does not require the type."""
    return item.type == ITEM_REFERENCE or (item.type is None and item.role is None and item.id is not None)


def with_referenced_items(body: ResponsesRequest, store: ResponseStore) -> ResponsesRequest:
    """Returns the request with the items that it refers to. Raises ApiError if one is not stored."""
    if isinstance(body.input, str) or not any(map(_is_reference, body.input)):
        return body
    items: list[Item] = []
    for index, item in enumerate(body.input):
        if _is_reference(item):
            found = store.get_item(item.id or "", REQUEST_CONTEXT.get().api_key)
            if found is None:
                message = f"input.{index}: Item with id {(item.id or '')[:100]!r} {NOT_FOUND}"
                raise ApiError(400, message, f"input.{index}")
            item = Item.model_validate(found)
        items.append(item)
    return body.model_copy(update={"input": items})


def _echoed_fields(body: ResponsesRequest, model: str, sampling: SamplingParams) -> dict[str, Any]:
    """Returns the fields of a request that its response repeats. Raises UnicodeEncodeError on an unpaired surrogate,
    before the engine gets the request."""
    fields = {
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "model": model,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_output_tokens": body.max_output_tokens,
        "previous_response_id": body.previous_response_id,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "tool_choice": "auto" if body.tool_choice is None else _plain(body.tool_choice),
        "tools": [{"strict": False, **tool.sent} for tool in body.tools or ()],
        "text": {"format": {"type": "text"}} if body.text is None else _plain(body.text),
        "reasoning": {} if body.reasoning is None else _plain(body.reasoning),
        "truncation": body.truncation or "disabled",
        "store": body.store is not False,
        "background": False,
    }
    ENCODER.encode(fields)
    return fields


def responses_router(context: AppContext, store: ResponseStore) -> APIRouter:
    """Returns the router of /v1/responses and /v1/responses/input_tokens."""
    router = APIRouter()

    @router.post("/v1/responses", responses=JSON_OR_SSE)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        _, codec = context.require_ready()
        model = context.resolve_model_name(body.model)
        reject_unsupported(body, ["best_of"])
        body = with_truncation(with_referenced_items(body, store))
        earlier_items = previous_items(body, store)
        conversation = responses_to_conversation(with_previous_items(body, earlier_items))
        top = body.top_logprobs or 0 if body.top_logprobs or LOGPROBS in (body.include or ()) else None
        generation_request = await chat_generation_request(
            context,
            request,
            body,
            conversation,
            limit=body.max_output_tokens,
            grammar=responses_grammar_request(body),
            logprobs=top,
        )
        output = GenerationOutput.create(generation_request, codec)
        fields = _echoed_fields(body, model, generation_request.engine_request.sampling)
        writer = ResponsesWriter(output, fields, LogprobFormatter(codec), top, namespaces(body))
        if body.store is False:
            return await respond(context, request, output, writer, body.stream, writer.error_events)
        input_items = ENCODER.encode([*earlier_items, *listed_items(body.input)])
        stored = StoredResponse(writer.response_id, REQUEST_CONTEXT.get().api_key, input_items)

        def save() -> None:
            stored.update(writer.response)
            store.put(stored)

        writer.on_end = save
        return await respond(context, request, output, writer, body.stream, writer.error_events)

    @router.post("/v1/responses/input_tokens")
    async def count_input_tokens(body: ResponsesRequest) -> dict[str, Any]:
        info, _ = context.require_ready()
        context.resolve_model_name(body.model)
        reject_unsupported(body, ["best_of"])
        body = with_truncation(with_referenced_items(body, store))
        full_body = with_previous_items(body, previous_items(body, store))
        conversation = responses_to_conversation(full_body)
        truncation = prompt_truncation(body, info, body.max_output_tokens)
        tokens = await encode_conversation(context, conversation, truncation)
        return {"object": "response.input_tokens", "input_tokens": len(tokens)}

    return router


def _plain(value: Body | str) -> Any:
    return value if isinstance(value, str) else value.model_dump(exclude_none=True, by_alias=True)
