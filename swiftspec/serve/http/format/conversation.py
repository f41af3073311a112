"""Conversations and tools: as OpenAI's clients send them, and as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from swiftspec.serve.http.errors import ApiError, unsupported
from swiftspec.serve.http.schema import Body, Object, Text, Variables, Word

RESERVED = frozenset({
    "conversation", "conversations", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "return_assistant_tokens_mask",
})  # fmt: skip
MOST_VARIABLES = 16 << 10  # characters of them as JSON
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
Talk = list[dict[str, Any]]


class ContentPart(Body):
    """Of text only."""

    type: Word
    text: Text | None = None


Content = Text | Annotated[list[ContentPart], Field(max_length=4096)]


class CalledFunction(Body):
    name: Name
    arguments: Text


class ToolCall(Body):
    id: Word | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Word | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: Word | None = None


class Function(Body):
    name: Name
    description: Text | None = None
    parameters: Object | None = None


class Tool(Body):
    type: Literal["function"] = "function"
    function: Function

    def shown(self) -> dict[str, Any]:
        """As chat templates take it."""
        return tool_of(self.function.name, self.function.description, self.function.parameters)


class NamedFunction(Body):
    name: Name


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(slots=True)
class Talked:
    """A conversation for a chat template. `choice`: none, auto, required, or the name of a tool."""

    messages: Talk
    tools: list[dict[str, Any]] = field(default_factory=list)
    choice: str = "auto"
    variables: Mapping[str, Any] = field(default_factory=dict)
    goes_on: bool = False
    single: bool = False

    def check(self) -> None:
        """Raises ApiError on a choice that is none, and on variables that a template is not to be given."""
        names = {tool["function"]["name"] for tool in self.tools}
        if self.choice not in ("none", "auto", "required") and self.choice not in names:
            raise ApiError(400, f"tool_choice: there is no tool {self.choice!r}", "tool_choice")
        if self.choice == "required" and not names:
            raise ApiError(400, "tool_choice: required needs tools", "tool_choice")
        for name in self.variables:
            if name in RESERVED or not name.isidentifier():
                raise ApiError(400, f"chat_template_kwargs: {name[:80]!r} is not to be set", "chat_template_kwargs")
        if len(json.dumps(dict(self.variables))) > MOST_VARIABLES:
            raise ApiError(400, f"chat_template_kwargs: more than {MOST_VARIABLES} characters", "chat_template_kwargs")
        if not self.messages:
            raise ApiError(400, "messages: there is none", "messages")
        if self.goes_on and (self.messages[-1]["role"] != "assistant" or not self.messages[-1].get("content")):
            raise ApiError(400, "continue_final_message: the last message must be the assistant's, with some text")


def text_of(content: str | Sequence[ContentPart] | None, param: str) -> str:
    """The text of a message. Raises ApiError on a part that is none."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for part in content:
        if part.type not in ("text", "input_text", "output_text", "refusal") or (
            part.text is None and part.type != "refusal"
        ):
            raise unsupported(param, f"a part of type {part.type[:40]!r}; this model reads text only")
        texts.append(part.text or "")
    return "\n".join(texts)


def called(call_id: str | None, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call in an earlier message, as templates take it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def parsed_arguments(text: str, param: str) -> dict[str, Any]:
    """Raises ApiError on arguments that are no JSON object."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ApiError(400, f"{param}: the arguments of a call must be a JSON object", param)
    return value


def talk_of(messages: Sequence[Message]) -> Talk:
    """Messages as chat templates take them: the content as one text."""
    talk: Talk = []
    for at, message in enumerate(messages):
        where = f"messages.{at}"
        text = text_of(message.content, f"{where}.content")
        one: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": text}
        if message.tool_calls:
            one["tool_calls"] = [
                called(call.id, call.function.name, parsed_arguments(call.function.arguments, f"{where}.tool_calls"))
                for call in message.tool_calls
            ]
            if message.content is None:
                one["content"] = None
        for name in ("name", "reasoning_content", "tool_call_id"):
            value = getattr(message, name)
            if value is not None:
                one[name] = value
        talk.append(one)
    return talk


def tool_of(name: str, description: str | None, parameters: Object | None) -> dict[str, Any]:
    """A tool as chat templates take it."""
    schema = parameters or {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {"name": name, "description": description or "", "parameters": schema},
    }


class TemplateFields(Body):
    """What else the chat template may be told."""

    chat_template_kwargs: Variables | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    continue_final_message: bool | None = None

    def variables(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}
