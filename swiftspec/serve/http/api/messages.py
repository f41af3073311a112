"""/v1/messages and /v1/messages/count_tokens: Anthropic's."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from swiftspec.serve.http.api.generation import BOTH_WAYS, chat_job, encode_talk, respond
from swiftspec.serve.http.api.sampling import Grammar
from swiftspec.serve.http.app_context import Server, number
from swiftspec.serve.http.errors import unsupported
from swiftspec.serve.http.format.answer import Answer, Part
from swiftspec.serve.http.format.conversation import Name, Talk, Talked, called, tool_of
from swiftspec.serve.http.format.tools import Call
from swiftspec.serve.http.schema import NEVER, ONE_CHOICE, Body, Object, Positive, Sampled, Stops, Text, Word, refuse
from swiftspec.serve.http.sse import event

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Block(Body):
    """A piece of a message: text, a thought, a call (tool_use) or what it gave (tool_result)."""

    type: Word
    text: Text | None = None
    thinking: Text | None = None
    id: Word | None = None
    name: Name | None = None
    input: Object | None = None
    tool_use_id: Word | None = None
    content: Any = None


Blocks = Annotated[list[Block], Field(max_length=4096)]


class InputMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: Text | Blocks


class InputTool(Body):
    type: Word | None = None
    name: Name
    description: Text | None = None
    input_schema: Object | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Object = Field(alias="schema")


class OutputConfig(Body):
    effort: Annotated[str, Field(max_length=32)] | None = None
    format: OutputFormat | None = None

    def grammar(self) -> Grammar | None:
        """What the answer has to keep to."""
        return None if self.format is None else ("json_schema", json.dumps(self.format.schema_), "output_config.format")


class CountRequest(Body):
    """A conversation whose tokens are to be counted."""

    model: Word | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=4096)]
    system: Text | Blocks | None = None
    tools: Annotated[list[InputTool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest, Sampled):
    """Anthropic's, with vLLM's sampling parameters."""

    max_tokens: Positive
    stop_sequences: Stops | None = None
    stream: bool | None = None


def text_of(content: str | list[Block] | None, where: str) -> str:
    """The text of blocks. Raises ApiError on what is none."""
    if content is None or isinstance(content, str):
        return content or ""
    for block in content:
        if block.type != "text":
            raise unsupported(where, f"a block of type {block.type[:40]!r}; this model reads text only")
    return "\n".join(block.text or "" for block in content)


def talk_of(body: CountRequest) -> Talk:
    """The conversation as chat templates take it."""
    talk: Talk = []
    system = text_of(body.system, "system")
    if system:
        talk.append({"role": "system", "content": system})
    for at, message in enumerate(body.messages):
        where = f"messages.{at}.content"
        if isinstance(message.content, str):
            talk.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            talk.append(_assistant(message.content, where))
        else:
            talk += _user(message.role, message.content, where)
    return talk


def _assistant(blocks: list[Block], where: str) -> dict[str, Any]:
    texts = [block for block in blocks if block.type not in ("tool_use", "thinking", "redacted_thinking")]
    calls = [called(b.id, b.name or "", b.input or {}) for b in blocks if b.type == "tool_use"]
    said = text_of(texts, where)
    one: dict[str, Any] = {"role": "assistant", "content": said or (None if calls else "")}
    thought = "".join(block.thinking or "" for block in blocks if block.type == "thinking")
    return {**one, **({"reasoning_content": thought} if thought else {}), **({"tool_calls": calls} if calls else {})}


def _user(role: str, blocks: list[Block], where: str) -> Talk:
    """What tools gave has messages of its own, before what is said besides."""
    talk: Talk = []
    for block in blocks:
        if block.type == "tool_result":
            talk.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block.content, where)})
    others = [block for block in blocks if block.type != "tool_result"]
    if others or not talk:
        talk.append({"role": role, "content": text_of(others, where)})
    return talk


def _result(content: Any, where: str) -> str:
    """What a tool gave: a text, or blocks of text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise unsupported(where, "a tool_result that is no text; this model reads text only")
    return "\n".join(str(text) for text in texts)


def talked_of(body: CountRequest) -> Talked:
    """The conversation and its tools, for the chat template. One that ends with the assistant's words goes on there."""
    tools: list[dict[str, Any]] = []
    for at, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "custom"):
            raise unsupported(f"tools.{at}", f"a tool of type {(tool.type or '')[:40]!r}; only tools of your own")
        tools.append(tool_of(tool.name, tool.description, tool.input_schema))
    chosen = body.tool_choice
    choice = "auto" if chosen is None else {"any": "required", "tool": chosen.name or ""}.get(chosen.type, chosen.type)
    variables: dict[str, Any] = {}
    if body.thinking is not None:
        variables["enable_thinking"] = body.thinking.type != "disabled"
    if body.output_config is not None and body.output_config.effort is not None:
        variables["reasoning_effort"] = body.output_config.effort
    talk = talk_of(body)
    last = talk[-1]
    goes_on = last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last
    return Talked(talk, tools, choice, variables, goes_on, bool(chosen and chosen.disable_parallel_tool_use))


class MessageWriter:
    """An answer in Anthropic's shape: blocks of thoughts, text and calls, one after the other."""

    def __init__(self, answer: Answer, model: str) -> None:
        self._answer = answer
        self._head = {"id": number("msg_"), "type": "message", "role": "assistant", "model": model}
        self._open: str | None = None
        self._index = -1

    def begin(self) -> bytes:
        """The message, still empty."""
        usage = {"input_tokens": len(self._answer.prompt), "output_tokens": 0, "cache_read_input_tokens": 0}
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return self._event("message_start", message=message)

    def part(self, part: Part) -> bytes:
        """A delta for each kind of text that the round has, and a block for each call."""
        out = b""
        if part.thought:
            out += self._delta("thinking", {"thinking": "", "signature": ""}, "thinking_delta", part.thought)
        if part.said:
            out += self._delta("text", {"text": ""}, "text_delta", part.said)
        for call in part.calls:
            out += self._call(call)
        return out

    def end(self) -> bytes:
        """What ended it, and the cost."""
        delta = {"stop_reason": self._reason(), "stop_sequence": self._answer.builder.stop}
        last = self._event("message_delta", delta=delta, usage=self._usage(), **self._answer.cost())
        return self._close() + last + self._event("message_stop")

    def whole(self) -> dict[str, Any]:
        """As one object."""
        answer = self._answer
        content: list[dict[str, Any]] = []
        if answer.thought:
            content.append({"type": "thinking", "thinking": answer.thought, "signature": ""})
        if answer.said or not answer.calls:
            content.append({"type": "text", "text": answer.said})
        for call in answer.calls:
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call.values})
        return {
            **self._head, "content": content, "stop_reason": self._reason(), "stop_sequence": answer.builder.stop,
            "usage": self._usage(), **answer.cost(),
        }  # fmt: skip

    def _reason(self) -> str:
        return "stop_sequence" if self._answer.builder.stop is not None else REASONS[self._answer.finish_reason]

    def _usage(self) -> dict[str, Any]:
        cached = self._answer.cached
        read, written = len(self._answer.prompt) - cached, len(self._answer.tokens)
        return {"input_tokens": read, "output_tokens": written, "cache_read_input_tokens": cached}

    def _delta(self, kind: str, empty: dict[str, str], name: str, text: str) -> bytes:
        out = b""
        if self._open != kind:
            out = self._close() + self._start(kind, empty)
        return out + self._event("content_block_delta", index=self._index, delta={"type": name, kind: text})

    def _call(self, call: Call) -> bytes:
        out = self._close() + self._start("tool_use", {"id": call.id, "name": call.name, "input": {}})
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        return out + self._event("content_block_delta", index=self._index, delta=delta) + self._close()

    def _start(self, kind: str, block: dict[str, Any]) -> bytes:
        self._open = kind
        self._index += 1
        return self._event("content_block_start", index=self._index, content_block={"type": kind, **block})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return self._event("content_block_stop", index=self._index)

    def _event(self, name: str, **values: Any) -> bytes:
        return event({"type": name, **values}, name)


def router(server: Server) -> APIRouter:
    """The endpoints."""
    made = APIRouter()

    @made.post("/v1/messages", responses=BOTH_WAYS)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        _, codec = server.ready()
        model = server.name(body.model)
        refuse(body, {**NEVER, **ONE_CHOICE})
        job = await chat_job(
            server, request, body, talked_of(body), limit=body.max_tokens, stops=body.stop_sequences or (),
            grammar=body.output_config and body.output_config.grammar(),
        )  # fmt: skip
        answer = Answer.of(job, codec)
        return await respond(server, request, answer, MessageWriter(answer, model), body.stream)

    @made.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountRequest) -> dict[str, int]:
        server.ready()
        server.name(body.model)
        return {"input_tokens": len(await encode_talk(server, talked_of(body)))}

    return made
