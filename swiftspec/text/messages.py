"""Messages of a conversation in the form that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from swiftspec.errors import UserError, truncated_repr
from swiftspec.settings_schema import require

BILLING_HEADER = "x-anthropic-billing-header:"
SystemMessages = Literal["any", "first", "none"]
USER, ANSWER, SYSTEM, LATER_SYSTEM = "zquser", "zqanswer", "zqsystem", "zqlater"  # texts that no template contains


def template_tool_call(call_id: str | None, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool call of an earlier message in the form that chat templates take. `arguments`: values by parameter
    name; templates get an object, not its JSON."""
    call = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
    return call if call_id is None else {"id": call_id, **call}


def template_message(
    role: str, content: str, tool_calls: Iterable[dict[str, Any]] = (), **fields: str | None
) -> dict[str, Any]:
    """Returns a message in the form that chat templates take. All chat endpoints build their messages here.

    Templates concatenate and split the content without a check of its type, so it is a text in every message, also in
    one that only calls tools.

    `role`: "developer" becomes "system", which templates know.
    `content`: without the line that Claude Code puts in front of a system prompt. A hash in it changes with every
        request, so that no prompt would share a prefix with another.
    `tool_calls`: results of `template_tool_call`.
    `fields`: other fields, such as `tool_call_id`; those that are None are left out.
    """
    role = "system" if role == "developer" else role
    if role == "system" and content.startswith(BILLING_HEADER):
        content = content.partition("\n")[2].lstrip("\n")
    message: dict[str, Any] = {"role": role, "content": content}
    calls = list(tool_calls)
    if calls:
        message["tool_calls"] = calls
    return message | {name: value for name, value in fields.items() if value is not None}


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Converts messages in OpenAI's format. Text parts are joined by newlines, and the arguments of tool calls become
    objects. Raises UserError if there is no message, or one is invalid."""
    require(len(messages) > 0, "a conversation needs at least one message")
    return [_template_message(index, message) for index, message in enumerate(messages)]


def _template_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    where = f"message {index}"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UserError(f"{where} must have a role and content, not be {truncated_repr(message)}")
    calls = []
    for call in message.get("tool_calls") or ():
        try:
            arguments = call["function"]["arguments"]
            arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
            calls.append(template_tool_call(call.get("id"), call["function"]["name"], dict(arguments)))
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{where}: a tool call needs a function with a name and arguments as JSON") from None
    known = ("role", "content", "tool_calls")
    others = {name: value for name, value in message.items() if name not in known}
    return template_message(message["role"], _content_text(where, message.get("content")), calls, **others)


def _content_text(where: str, content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, Sequence) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"{where}: the content must be text or text parts, not {truncated_repr(content)}")
    return "\n".join(map(str, texts))


def accepted_system_messages(render: Callable[[list[dict[str, Any]]], str]) -> SystemMessages:
    """Returns where a chat template takes system messages: anywhere, only at the beginning, or nowhere.

    `render`: renders messages up to the beginning of the answer; raises UserError if the template fails.
    """
    user, answer = {"role": "user", "content": USER}, {"role": "assistant", "content": ANSWER}
    first, later = {"role": "system", "content": SYSTEM}, {"role": "system", "content": LATER_SYSTEM}

    def takes(messages: list[dict[str, Any]], *texts: str) -> bool:
        try:
            text = render(messages)
        except UserError:
            return False
        return all(each in text for each in texts)

    if takes([first, later, user, answer, later, user], SYSTEM, LATER_SYSTEM) and takes(
        [first, user, answer, later, user], LATER_SYSTEM
    ):
        return "any"
    return "first" if takes([first, user], SYSTEM) or not takes([user], USER) else "none"


def with_fitting_system_messages(
    messages: Sequence[Mapping[str, Any]], accepted: SystemMessages
) -> Sequence[Mapping[str, Any]]:
    """Returns messages with system messages only where a template accepts them.

    Those at the beginning become one, or if the template takes none, the beginning of the user's first message. Later
    ones are joined to the message before them, or after an answer to the user's next message: the prompt then begins
    like that of the turn before, which the prefix cache supplies.
    """
    if accepted == "any" or all(message["role"] != "system" for message in messages):
        return messages
    fitting: list[dict[str, Any]] = []
    joins_user = False  # the last message is a system message that became the user's
    for message in messages:
        is_system, last = message["role"] == "system", fitting[-1] if fitting else None
        follows_answer = last is not None and last["role"] == "assistant"
        if last is not None and ((is_system and not follows_answer) or (message["role"] == "user" and joins_user)):
            last["content"] = f"{last['content']}\n\n{message['content']}"
        else:
            fitting.append({**message, "role": "user"} if is_system and follows_answer else dict(message))
        joins_user = is_system and (joins_user or follows_answer)
    if accepted == "none" and fitting[0]["role"] == "system":
        first = fitting.pop(0)
        user = next((message for message in fitting if message["role"] == "user"), None)
        if user is None:
            return [{**first, "role": "user"}, *fitting]
        user["content"] = f"{first['content']}\n\n{user['content']}"
    return fitting
