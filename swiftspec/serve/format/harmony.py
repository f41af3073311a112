"""Harmony format of gpt-oss in the server: parser of the output, grammar, and input of the chat template."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from swiftspec.sampling.grammar_process import ANY_OBJECT, bound_whitespace
from swiftspec.serve.format.call_reader import STRICT_JSON, TOOL_NAME
from swiftspec.serve.format.output_parser import OutputPart, OutputText
from swiftspec.serve.format.tool_parser import ParsedToolCall
from swiftspec.text.harmony import (
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    START,
    ChannelParser,
    MessageHeader,
    MessageText,
)

FUNCTIONS = "functions."  # prefix of the recipient of a tool call


class HarmonyParser:
    """Parser of output in harmony: the channel analysis is reasoning, a message to a function is a tool call, and all
    other text is content. Messages of the same kind are separated by newlines.

    `prompt_end`: see `ChannelParser`.
    `tool_names`: names of the available tools; None: no message is a tool call.
    `drops_cut_call`: whether a call that is cut is dropped instead of being content.
    `keep_cut_call`: whether a call that is cut is returned with the arguments as far as they were generated.
    """

    def __init__(
        self,
        prompt_end: str,
        tool_names: Collection[str] | None = None,
        *,
        drops_cut_call: bool = False,
        keep_cut_call: bool = False,
    ) -> None:
        self._channels = ChannelParser(prompt_end)
        self._tool_names = tool_names
        self._drops_cut_call, self._keep_cut_call = drops_cut_call, keep_cut_call
        self._call: MessageHeader | None = None  # the message of the call that is being read
        self._arguments = ""
        self._last: dict[str, tuple[MessageHeader, str]] = {}  # last message and text by kind

    @property
    def reasoning_ranges(self) -> Sequence[tuple[float, float]]:
        """The characters of the channel analysis."""
        return self._channels.reasoning_ranges

    def push(self, text: str, last: bool = False) -> list[OutputPart]:
        """Adds text; see `OutputParser.push`."""
        parts: list[OutputPart] = []
        for part in self._channels.push(text, last):
            if self._call_name(part.header) is None:
                self._add_text(parts, part.header, part.text)
            else:
                self._add_to_call(parts, part)
        if last and self._call is not None:
            self._end_call(parts, cut=True)
        return parts

    def _call_name(self, header: MessageHeader) -> str | None:
        """Returns the name of the tool that a message calls; None if it is not a call."""
        recipient = header.recipient
        if self._tool_names is None or not (recipient.startswith(FUNCTIONS) or recipient in self._tool_names):
            return None
        name = recipient.removeprefix(FUNCTIONS)
        return name if TOOL_NAME.fullmatch(name) else None

    def _add_text(self, parts: list[OutputPart], header: MessageHeader, text: str) -> None:
        if not text:
            return
        kind = header.kind
        if kind in self._last:
            earlier, end = self._last[kind]
            separator = "\n" if earlier is not header and not end.endswith("\n") else ""
            parts.append(OutputText(kind, separator + text))
        else:
            parts.append(OutputText(kind, text))
        self._last[kind] = header, text[-1]

    def _add_to_call(self, parts: list[OutputPart], part: MessageText) -> None:
        self._call = part.header
        self._arguments += part.text
        if part.ended:
            self._end_call(parts, cut=False)

    def _end_call(self, parts: list[OutputPart], *, cut: bool) -> None:
        """Adds the call that has been read; as text if its arguments are not a JSON object."""
        assert self._call is not None
        header, text, name = self._call, self._arguments, self._call_name(self._call) or ""
        self._call, self._arguments = None, ""
        arguments = _parse_object(text if cut or text.strip() else "{}")  # a call may have no body
        call_id = f"call_{secrets.token_hex(12)}"
        if arguments is not None:
            parts.append(ParsedToolCall(call_id, name, arguments))
        elif cut and self._keep_cut_call:
            parts.append(ParsedToolCall(call_id, name, {}, cut_json=text))
        elif not (cut and self._drops_cut_call):
            self._add_text(parts, MessageHeader(header.role, "commentary"), text)


def _parse_object(text: str) -> dict[str, Any] | None:
    """Returns a JSON object, or None if `text` is anything else."""
    try:
        value = STRICT_JSON.decode(text.strip())
        json.dumps(value, ensure_ascii=False).encode()  # raises on an unpaired surrogate
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def harmony_grammar(
    markers: Mapping[int, str],
    state: Literal["between", "header"],
    tools: Mapping[str, dict[str, Any]],
    answer: bool,
) -> str:
    """Returns a Lark grammar for llguidance of an output in harmony: at most one message of analysis, then one call or
    one answer in the channel final.

    `markers`: see `harmony_markers`.
    `state`: of the `ChannelParser` after the prompt.
    `tools`: JSON schema of the arguments by name of the tools that can be called.
    `answer`: whether an answer is accepted, which is the grammar that the rule `@answer` refers to.
    """
    ids = {character: f"<[{token}]>" for token, character in markers.items()}
    start, channel, message, end = (ids[character] for character in (START, CHANNEL, MESSAGE, END))
    kind = f'({ids[CONSTRAIN]})? "json"' if CONSTRAIN in ids else '"json"'
    finals = ["call"] * bool(tools) + ["final"] * answer
    begin = "" if state == "header" else f'{start} "assistant" '
    lines = [
        f"start: {begin}(analysis)? ({' | '.join(finals)})",
        f'analysis: {channel} "analysis" {message} ANY_TEXT {end} {start} "assistant"',
        "ANY_TEXT: /(?s:.*)/",
    ]
    if answer:
        lines.append(f'final: {channel} "final" (" "? {kind})? {message} @answer')
    if tools:
        lines.append(f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}")
    for index, (name, schema) in enumerate(tools.items()):  # one rule per schema, since a schema can refer to its root
        recipient = json.dumps(f" to={FUNCTIONS}{name}")
        after_channel = f'{channel} "commentary" {recipient} (" "? {kind})?'
        after_role = f'{recipient} {channel} "commentary" (" "? {kind})?'
        lines.append(f"call_{index}: ({after_channel} | {after_role}) {message} values_{index}")
        lines.append(f"values_{index}: %json {json.dumps(bound_whitespace(schema or ANY_OBJECT))}")
    return "\n".join(lines)


def harmony_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages in the form that the chat template of gpt-oss takes: the reasoning is named `thinking`, and an
    assistant message has one tool call, which its result follows.

    The template renders the content of a message with a call as analysis, and fails if there is reasoning too; then the
    reasoning contains both.
    """
    converted = [_with_thinking(message) for message in messages]
    out: list[dict[str, Any]] = []
    index = 0
    while index < len(converted):
        message = converted[index]
        index += 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            out.append(message)
            continue
        results: list[dict[str, Any]] = []
        while index < len(converted) and converted[index]["role"] == "tool":
            results.append(converted[index])
            index += 1
        out += _separate_calls(message, calls, results)
    return out


def _with_thinking(message: Mapping[str, Any]) -> dict[str, Any]:
    converted = dict(message)
    reasoning = converted.pop("reasoning_content", None)
    if not reasoning or message["role"] != "assistant":
        return converted
    if converted.get("tool_calls") and converted.get("content"):
        reasoning, converted["content"] = f"{reasoning}\n{converted['content']}", ""
    return {**converted, "thinking": reasoning}


def _separate_calls(
    message: dict[str, Any], calls: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns a message for each call, followed by its result: that with its id, or the one at its position if the
    ids are missing."""
    remaining = list(results)
    out: list[dict[str, Any]] = []
    for number, call in enumerate(calls):
        head = message if number == 0 else {"role": message["role"], "content": ""}
        out.append({**head, "tool_calls": [call]})
        named = [
            at for at, result in enumerate(remaining) if call.get("id") and result.get("tool_call_id") == call["id"]
        ]
        unnamed = [at for at, result in enumerate(remaining) if not (call.get("id") and result.get("tool_call_id"))]
        if named or unnamed:
            out.append(remaining.pop((named or unnamed)[0]))
    return out + remaining


def harmony_tools(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns tools with a description each, without which the chat template of gpt-oss fails."""
    return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]
