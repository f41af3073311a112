"""Endpoints /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from swiftspec.params import MAX_TOKEN_COUNT
from swiftspec.sampling.grammar_process import lenient
from swiftspec.serve.api.generation import JSON_OR_SSE, chat_generation_request, encode_conversation, respond
from swiftspec.serve.api.sampling import GrammarRequest
from swiftspec.serve.app_context import AppContext, new_id
from swiftspec.serve.errors import ApiError, unsupported
from swiftspec.serve.format.conversation import (
    Conversation,
    Name,
    TemplateMessages,
    omitted_part,
    template_message,
    template_tool_call,
)
from swiftspec.serve.format.generation_output import GenerationOutput, OutputDelta
from swiftspec.serve.format.tool_parser import ParsedToolCall
from swiftspec.serve.known_fields import reject_unsupported
from swiftspec.serve.schema import (
    Body,
    ExtensibleBody,
    JsonObject,
    Positive,
    SamplingFields,
    ShortText,
    Stops,
    Text,
    Variables,
)
from swiftspec.serve.sse import sse_event

MIN_THINKING_BUDGET_TOKENS = 1024  # Anthropic's limit
PASSED_OVER = ("tool_use", "server_tool_use", "thinking", "redacted_thinking")  # are not part of an answer's text
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Block(Body):
    """A content block: text, document (of text), thinking, tool_use or tool_result."""

    type: ShortText
    text: Text | None = None
    thinking: Text | None = None
    id: ShortText | None = None
    name: Name | None = None
    input: JsonObject | None = None
    tool_use_id: ShortText | None = None
    content: Any = None
    source: Any = Field(None, description="Of a document: plain text (type text), or content of text blocks.")
    title: Text | None = None
    context: Text | None = None


Blocks = Annotated[list[Block], Field(max_length=4096)]


class InputMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: Text | Blocks


class InputTool(Body):
    type: ShortText | None = None
    name: Name
    description: Text | None = None
    input_schema: JsonObject | None = None
    strict: bool | None = None

    def to_template(self) -> JsonObject:
        """Returns the tool in OpenAI's schema, the form that chat templates take, with the fields that were sent."""
        fields = self.model_dump(include={"name", "description", "strict"}, exclude_none=True)
        parameters = {} if self.input_schema is None else {"parameters": self.input_schema}
        return {"type": "function", "function": {**fields, **parameters}}


class AnthropicToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=MIN_THINKING_BUDGET_TOKENS, le=MAX_TOKEN_COUNT)] | None = Field(
        None, description="Validated and otherwise ignored: the model decides how long it reasons."
    )


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Body):
    effort: Annotated[str, Field(max_length=32)] | None = None
    format: OutputFormat | None = None


class CountRequest(ExtensibleBody):
    """Request of the count_tokens endpoint."""

    model: ShortText | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=4096)]
    system: Text | Blocks | None = None
    tools: Annotated[list[InputTool], Field(max_length=128)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="Earlier name of output_config.format.")
    chat_template_kwargs: Variables | None = None


class MessagesRequest(CountRequest, SamplingFields):
    """Request of Anthropic's messages endpoint, with vLLM's sampling parameters."""

    max_tokens: Positive
    stop_sequences: Stops | None = None
    stream: bool | None = None


def messages_grammar_request(body: CountRequest) -> GrammarRequest | None:
    """Returns the grammar that constrains the output, or None. Raises ApiError if the request contains two formats."""
    config = None if body.output_config is None else body.output_config.format
    if config is not None and body.output_format is not None:
        raise ApiError(400, "output_format: the earlier name of output_config.format; omit it", "output_format")
    if config is not None:
        return "json_schema", json.dumps(lenient(config.schema_)), "output_config.format"
    if body.output_format is not None:
        return "json_schema", json.dumps(lenient(body.output_format.schema_)), "output_format"
    return None


def blocks_text(content: Any, field_path: str) -> str:
    """Returns the text of a message, a tool result or a document: a string, or blocks, whose texts are joined by
    newlines. Raises ApiError on a block that is neither text nor a document of text."""
    if content is None or isinstance(content, str):
        return content or ""
    blocks = content if isinstance(content, list) else [content]
    return "\n".join(_block_text(block, field_path) for block in blocks)


def _block_text(block: Any, field_path: str) -> str:
    fields = block.model_dump(exclude_none=True) if isinstance(block, Block) else block
    kind = fields.get("type") if isinstance(fields, dict) else None
    if kind == "text" and isinstance(fields.get("text", ""), str):
        return fields.get("text", "")
    if kind == "tool_reference":  # a tool that a search has found; its definition is among the tools
        return str(fields.get("tool_name", ""))
    if kind != "document":
        raise unsupported(field_path, f"blocks of type {str(kind)[:40]!r} are not supported; use text")
    source = fields.get("source")
    origin = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or origin not in ("text", "content"):
        raise unsupported(
            field_path, f"documents from a source of type {str(origin)[:40]!r} are not supported; use type text"
        )
    text = blocks_text(source.get("data" if origin == "text" else "content"), field_path)
    head = [fields.get(name) for name in ("title", "context")]
    return "\n".join([line for line in head if isinstance(line, str) and line] + [text])


def _tool_result_text(content: Any, field_path: str) -> str:
    """As `blocks_text`, but blocks that are not text are replaced, see `omitted_part`."""
    if not isinstance(content, list):
        return blocks_text(content, field_path)
    texts: list[str] = []
    for block in content:
        try:
            texts.append(_block_text(block, field_path))
        except ApiError:
            if not isinstance(block, dict):
                raise
            texts.append(omitted_part(str(block.get("type"))))
    return "\n".join(texts)


def anthropic_to_template_messages(body: CountRequest) -> TemplateMessages:
    """Converts the messages to the form that chat templates take. Raises ApiError on content that is not text."""
    system = template_message("system", blocks_text(body.system, "system"))
    template_messages: TemplateMessages = [system] if system["content"] else []
    for index, message in enumerate(body.messages):
        field_path = f"messages.{index}.content"
        if isinstance(message.content, str):
            template_messages.append(template_message(message.role, message.content))
        elif message.role == "assistant":
            template_messages.append(_assistant_message(message.content, field_path))
        else:
            template_messages += _user_messages(message.role, message.content, field_path)
    return template_messages


def _assistant_message(blocks: list[Block], field_path: str) -> dict[str, Any]:
    texts = [block for block in blocks if block.type not in PASSED_OVER and not block.type.endswith("_tool_result")]
    calls = [template_tool_call(b.id, b.name or "", b.input or {}) for b in blocks if b.type == "tool_use"]
    reasoning = "".join(block.thinking or "" for block in blocks if block.type == "thinking")
    return template_message("assistant", blocks_text(texts, field_path), calls, reasoning_content=reasoning or None)


def _user_messages(role: str, blocks: list[Block], field_path: str) -> TemplateMessages:
    """Converts a message of the user. Each tool result becomes a separate message before the remaining content."""
    template_messages = [
        template_message("tool", _tool_result_text(block.content, field_path), tool_call_id=block.tool_use_id)
        for block in blocks
        if block.type == "tool_result"
    ]
    others = [block for block in blocks if block.type != "tool_result"]
    if others or not template_messages:
        template_messages.append(template_message(role, blocks_text(others, field_path)))
    return template_messages


def anthropic_to_conversation(body: CountRequest) -> Conversation:
    """Converts a request to a conversation for the chat template. If the last message is the assistant's, the output
    continues that message. Tools that are executed by Anthropic's servers or that its models know are passed
    over. Raises ApiError on content that the server does not support."""
    tools = [tool.to_template() for tool in body.tools or () if tool.type in (None, "custom")]
    tool_choice = body.tool_choice
    names = {} if tool_choice is None else {"any": "required", "tool": tool_choice.name or ""}
    choice = "auto" if tool_choice is None else names.get(tool_choice.type, tool_choice.type)
    variables = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        variables["enable_thinking"] = body.thinking.type != "disabled"
    if body.output_config is not None and body.output_config.effort is not None:
        variables["reasoning_effort"] = body.output_config.effort
    template_messages = anthropic_to_template_messages(body)
    last = template_messages[-1]
    continues_last_message = last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last
    return Conversation(
        template_messages,
        tools,
        choice,
        variables,
        continues_last_message,
        bool(tool_choice and tool_choice.disable_parallel_tool_use),
    )


def anthropic_usage(input_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, int]:
    """Returns Anthropic's `usage` object. `input_tokens`: without those that the prefix cache supplied."""
    return {
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "cache_read_input_tokens": cached_tokens,
        "cache_creation_input_tokens": 0,
    }


class MessageWriter:
    """Formatter of a generation as an Anthropic message: a sequence of thinking, text and tool_use blocks."""

    has_logprobs = False

    def __init__(self, output: GenerationOutput, model: str) -> None:
        self._output = output
        self._common_fields = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model}
        self._open_kind: str | None = None
        self._index = -1

    def start_events(self) -> bytes:
        """Returns the start event, which contains an empty message."""
        usage = self._usage() | {"output_tokens": 0}
        message = {**self._common_fields, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return self._event("message_start", message=message)

    def delta_events(self, delta: OutputDelta) -> bytes:
        """Returns a delta for each piece of text in the round, and a block for each tool call."""
        out = b""
        for piece in delta.pieces:
            if piece.tool_call is not None:
                out += self._call_events(piece.tool_call)
            elif piece.kind == "reasoning":
                out += self._delta_events("thinking", {"thinking": "", "signature": ""}, "thinking_delta", piece.text)
            else:
                out += self._delta_events("text", {"text": ""}, "text_delta", piece.text)
        return out

    def end_events(self) -> bytes:
        """Returns the last events: stop reason and usage."""
        out = b"" if self._has_content() else self._close_block() + self._start_block("text", {"text": ""})
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._output.text_builder.stop_string}
        last = self._event("message_delta", delta=delta, usage=self._usage(), **self._output.synthetic_stats())
        return out + self._close_block() + last + self._event("message_stop")

    def full_response(self) -> dict[str, Any]:
        """Returns the complete message."""
        output = self._output
        content: list[dict[str, Any]] = []
        for piece in output.pieces:
            if piece.tool_call is not None:
                call = piece.tool_call
                content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments})
            elif piece.kind == "reasoning":
                content.append({"type": "thinking", "thinking": piece.text, "signature": ""})
            else:
                content.append({"type": "text", "text": piece.text})
        if not self._has_content():
            content.append({"type": "text", "text": ""})
        return {
            **self._common_fields,
            "content": content,
            "stop_reason": self._stop_reason(),
            "stop_sequence": output.text_builder.stop_string,
            "usage": self._usage(),
            **output.synthetic_stats(),
        }

    def _has_content(self) -> bool:
        """Whether the output contains more than reasoning. Otherwise the message ends with an empty text block."""
        return bool(self._output.content or self._output.tool_calls)

    def _stop_reason(self) -> str:
        return (
            "stop_sequence"
            if self._output.text_builder.stop_string is not None
            else STOP_REASONS[self._output.finish_reason]
        )

    def _usage(self) -> dict[str, Any]:
        cached = self._output.num_cached_tokens
        prefilled, generated = len(self._output.prompt) - cached, len(self._output.tokens)
        return anthropic_usage(prefilled, generated, cached)

    def _delta_events(self, kind: str, empty: dict[str, str], name: str, text: str) -> bytes:
        out = b""
        if self._open_kind != kind:
            out = self._close_block() + self._start_block(kind, empty)
        return out + self._event("content_block_delta", index=self._index, delta={"type": name, kind: text})

    def _call_events(self, call: ParsedToolCall) -> bytes:
        out = self._close_block() + self._start_block("tool_use", {"id": call.id, "name": call.name, "input": {}})
        delta = {"type": "input_json_delta", "partial_json": call.arguments_json}
        return out + self._event("content_block_delta", index=self._index, delta=delta) + self._close_block()

    def _start_block(self, kind: str, block: dict[str, Any]) -> bytes:
        self._open_kind = kind
        self._index += 1
        return self._event("content_block_start", index=self._index, content_block={"type": kind, **block})

    def _close_block(self) -> bytes:
        if self._open_kind is None:
            return b""
        self._open_kind = None
        return self._event("content_block_stop", index=self._index)

    def _event(self, name: str, **values: Any) -> bytes:
        return sse_event({"type": name, **values}, name)


def messages_router(context: AppContext) -> APIRouter:
    """Returns the router of /v1/messages and /v1/messages/count_tokens."""
    router = APIRouter()

    @router.post("/v1/messages", responses=JSON_OR_SSE)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        _, codec = context.require_ready()
        model = context.resolve_model_name(body.model)
        reject_unsupported(body, ["best_of"])
        generation_request = await chat_generation_request(
            context,
            request,
            body,
            anthropic_to_conversation(body),
            limit=body.max_tokens,
            stops=body.stop_sequences or (),
            grammar=messages_grammar_request(body),
        )
        output = GenerationOutput.create(generation_request, codec)
        return await respond(context, request, output, MessageWriter(output, model), body.stream)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountRequest) -> dict[str, int]:
        context.require_ready()
        context.resolve_model_name(body.model)
        reject_unsupported(body, ignored=MessagesRequest.model_fields)
        return {"input_tokens": len(await encode_conversation(context, anthropic_to_conversation(body)))}

    return router
