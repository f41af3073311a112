"""Conversations and tools: OpenAI's request schema, and its conversion to the input of chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from swiftspec.serve.errors import ApiError, unsupported
from swiftspec.serve.format.call_reader import STRICT_JSON
from swiftspec.serve.schema import Body, ExtensibleBody, JsonObject, ShortText, Text, Variables
from swiftspec.text.messages import template_message, template_tool_call

RESERVED_VARIABLES = frozenset(
    {
        "conversation",
        "conversations",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
    }
)
FUNCTION = "function"
CUSTOM_INPUT = "input"  # parameter of a custom tool, whose input is a text
MAX_VARIABLES_CHARS = 16 << 10  # length of all template variables as JSON
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
TemplateMessages = list[dict[str, Any]]


class ContentPart(Body):
    """A content part; only text is supported."""

    type: ShortText
    text: Text | None = None
    refusal: Text | None = None


Content = Text | Annotated[list[ContentPart], Field(max_length=4096)]


class CalledFunction(Body):
    name: Name
    arguments: Text | JsonObject | None = None


class CalledCustomTool(Body):
    name: Name
    input: Text


class ToolCall(Body):
    id: ShortText | None = None
    type: ShortText | None = None
    function: CalledFunction | None = None
    custom: CalledCustomTool | None = None

    def to_template(self, field_path: str) -> JsonObject:
        """Returns the call in the form that chat templates take. Raises ApiError if it is of another type."""
        if self.function is not None:
            return template_tool_call(self.id, self.function.name, parse_arguments(self.function.arguments))
        if self.custom is not None:
            return template_tool_call(self.id, self.custom.name, {CUSTOM_INPUT: self.custom.input})
        raise ApiError(400, f"{field_path}: a tool call needs function or custom", field_path)


class Message(Body):
    role: Name = Field(
        description="system, developer, user, assistant, tool, or another role that the chat template renders."
    )
    content: Content | None = None
    name: ShortText | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = Field(None, description="The same as reasoning_content.")
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: ShortText | None = None


class Function(Body):
    name: Name
    description: Text | None = None
    parameters: JsonObject | None = None


class SentBody(Body):
    """Request model that keeps the JSON object of the client, with the order of its fields and with unknown fields."""

    _sent: JsonObject = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_sent(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        body = handler(value)
        body._sent = value if isinstance(value, dict) else body.model_dump(exclude_unset=True)
        return body

    @property
    def sent(self) -> JsonObject:
        """The JSON object of the client."""
        return self._sent


class Tool(SentBody):
    type: ShortText = FUNCTION
    function: Function | None = Field(None, description="Required if the type is function; others are passed over.")


def template_tools(tools: Sequence[Tool]) -> list[JsonObject]:
    """Returns the functions among the tools of a request as the client sent them, which is the form that chat templates
    take. Raises ApiError if one has no description."""
    functions: list[JsonObject] = []
    for index, tool in enumerate(tools):
        if tool.type != FUNCTION:
            continue
        if tool.function is None:
            raise ApiError(400, f"tools.{index}.function: required in a function", f"tools.{index}.function")
        functions.append({"type": FUNCTION, **tool.sent})
    return functions


class NamedFunction(Body):
    name: Name


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(slots=True)
class Conversation:
    """Conversation to render with a chat template.

    `tool_choice`: "none", "auto", "required", or the name of a tool.
    `template_variables`: further variables of the chat template.
    `add_generation_prompt`: whether the prompt ends with the beginning of the assistant's message. Has no effect if
        `continues_last_message` is set.
    `continues_last_message`: whether the output continues the last message, which must be the assistant's, instead of
        starting a new message.
    `single_tool_call`: whether the output ends after its first tool call.
    """

    messages: TemplateMessages
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str = "auto"
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    continues_last_message: bool = False
    single_tool_call: bool = False
    add_generation_prompt: bool = True

    @property
    def forces_tool_call(self) -> bool:
        """Whether the output must be a tool call."""
        return bool(self.tools) and self.tool_choice not in ("none", "auto")

    def validate(self) -> None:
        """Raises ApiError on an unknown tool choice, a reserved template variable or an invalid last message."""
        names = {tool["function"]["name"] for tool in self.tools}
        if self.tool_choice not in ("none", "auto", "required") and self.tool_choice not in names:
            raise ApiError(400, f"tool_choice: there is no tool {self.tool_choice!r}", "tool_choice")
        for name in self.template_variables:
            if name in RESERVED_VARIABLES or not name.isidentifier():
                raise ApiError(400, f"chat_template_kwargs: {name[:80]!r} cannot be set", "chat_template_kwargs")
        if len(json.dumps(dict(self.template_variables))) > MAX_VARIABLES_CHARS:
            raise ApiError(
                400, f"chat_template_kwargs: more than {MAX_VARIABLES_CHARS} characters", "chat_template_kwargs"
            )
        if not self.messages:
            raise ApiError(400, "messages: the list is empty", "messages")
        if self.continues_last_message and (
            self.messages[-1]["role"] != "assistant" or not self.messages[-1].get("content")
        ):
            raise ApiError(400, "continue_final_message: the last message must be an assistant message with text")


def omitted_part(kind: str) -> str:
    """Returns the text that replaces a part of a tool's result that is not text. An error would end the conversation:
    the model has called the tool, and the client repeats its result in every later request."""
    return f"[{kind[:40]} omitted: this model reads text only]"


def content_text(content: str | Sequence[ContentPart] | None, param: str, *, is_tool_result: bool = False) -> str:
    """Returns the text of a message; text parts are joined by newlines, and parts of reasoning are left out. Raises
    ApiError if a part is not text, except in the result of a tool."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for part in content:
        text = part.refusal if part.type == "refusal" else part.text
        if part.type in ("thinking", "redacted_thinking"):
            continue
        if part.type not in ("text", "input_text", "output_text", "refusal") or text is None:
            if not is_tool_result:
                raise unsupported(param, f"parts of type {part.type[:40]!r} are not supported; use text")
            text = omitted_part(part.type)
        texts.append(text)
    return "\n".join(texts)


def parse_arguments(text: str | JsonObject | None) -> dict[str, Any]:
    """Parses the arguments of an earlier tool call; {} if they are not a JSON object, such as those of a call that a
    limit cut: the client cannot change its history."""
    if not isinstance(text, str):
        return text or {}
    try:
        value = STRICT_JSON.decode(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def to_template_messages(messages: Sequence[Message]) -> TemplateMessages:
    """Converts messages to the form that chat templates take, with the content of each as one string."""
    template_messages: TemplateMessages = []
    for index, message in enumerate(messages):
        field_path = f"messages.{index}"
        calls = [call.to_template(f"{field_path}.tool_calls") for call in message.tool_calls or ()]
        text = content_text(message.content, f"{field_path}.content", is_tool_result=message.role == "tool")
        reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
        names = {"name": message.name, "tool_call_id": message.tool_call_id}
        template_messages.append(template_message(message.role, text, calls, reasoning_content=reasoning, **names))
    return template_messages


class TemplateFields(ExtensibleBody):
    """Request fields that are passed to the chat template."""

    chat_template_kwargs: Variables | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = Field(
        None, description="Begin a message of the assistant (default); not together with continue_final_message."
    )

    def template_variables(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}

    def to_conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        tool_choice: str = "auto",
        single_tool_call: bool = False,
    ) -> Conversation:
        """Converts messages and tools to a conversation. Raises ApiError on content that is not text, or if both
        `continue_final_message` and `add_generation_prompt` are true."""
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt cannot both be true: omit one of them"
            raise ApiError(400, message, "add_generation_prompt")
        return Conversation(
            messages=to_template_messages(messages),
            tools=template_tools(tools or ()),
            tool_choice=tool_choice,
            template_variables=self.template_variables(),
            continues_last_message=bool(self.continue_final_message),
            single_tool_call=single_tool_call,
            add_generation_prompt=self.add_generation_prompt is not False,
        )
