"""Tool-call parsing: finds tool calls in generated text, in the formats of Hermes, Mistral and Llama."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from swiftspec.serve.http.format.reasoning import partial_marker_length

TOOL_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """Tool call in generated text. `arguments`: values by parameter name."""

    id: str
    name: str
    arguments: dict[str, Any]

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON."""
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """Syntax of tool calls in generated text.

    `begin`, `end`: markers around each call; if `end` is None, all text after `begin` consists of calls.
    `arguments_key`: JSON key of the arguments.
    `leading`: whether calls occur only at the beginning of the text.
    """

    begin: str
    end: str | None
    arguments_key: str
    leading: bool = False


HERMES = ToolCallFormat("<tool_call>", "</tool_call>", "arguments")
MISTRAL = ToolCallFormat("[TOOL_CALLS]", None, "arguments")
LLAMA = ToolCallFormat("", None, "parameters", leading=True)
LLAMA_PATTERN = re.compile(r"""["']name\\?["']:.{1,60}["']parameters\\?["']:""")
UNSUPPORTED_MARKERS = (
    "<function=",
    "<arg_key>",
    "[ARGS]",
)  # of formats whose calls are not JSON, or have the tool's name outside of the JSON


def detect_tool_format(template: str) -> ToolCallFormat | None:
    """Returns the tool-call format of a chat template, or None if it has no tools or uses an unsupported format."""
    if "tools" not in template or any(other in template for other in UNSUPPORTED_MARKERS):
        return None
    for format in (HERMES, MISTRAL):
        if format.begin in template:
            return format
    return LLAMA if LLAMA_PATTERN.search(template) else None


class ToolCallParser:
    """Parser that separates tool calls from content in streamed text. A call is returned when it is complete; text that
    turns out not to be a call is returned as content.

    `tool_names`: names of the available tools. In a format without markers, a JSON object is a call only if its name is
        one of these.
    """

    def __init__(self, format: ToolCallFormat, tool_names: Collection[str]) -> None:
        self._format, self._tool_names = format, tool_names
        self._buffer = ""
        self._in_call = False
        self._has_content = False
        self._content_since_call = False  # content was returned since the last call
        self.num_calls = 0

    def push(self, text: str, last: bool = False) -> tuple[str, list[ParsedToolCall]]:
        """Adds text. Returns the new content and calls that later text cannot change. `last`: no text follows, so that
        all buffered text is returned."""
        self._buffer += text
        content, calls = "", []
        while True:
            if not self._in_call:
                content += self._read_content(last)
                if not self._in_call:
                    return content, calls
            text, end = self._buffer, self._format.end
            parsed = self._read_calls(text, last)
            if parsed is None and not last:
                return content, calls
            self._in_call = False
            if parsed is None:  # the call is not closed, or is not JSON
                self._buffer = ""
                return content + self._format.begin + text, calls
            calls += parsed[0]
            self._content_since_call = False
            self.num_calls += len(parsed[0])
            self._buffer = parsed[1]
            if end is None:
                self._buffer = ""
                return content, calls

    def _read_content(self, last: bool) -> str:
        """Returns the content before the next call, without whitespace at its end. Sets `_in_call` if a call begins."""
        if self._format.leading:
            text = self._buffer.lstrip()
            self._in_call = not self._has_content and text.startswith("{")
            if self._in_call or (not text and not last and not self._has_content):
                return ""
            self._has_content = True
            content, self._buffer = self._buffer, ""
            return content
        before, opened, remaining = self._buffer.partition(self._format.begin)
        if opened:
            self._in_call, self._buffer = True, remaining
            return before.rstrip()
        certain = before if last else before[: len(before) - partial_marker_length(before, self._format.begin)].rstrip()
        self._buffer = before[len(certain) :]
        if last:
            self._buffer = ""
            if self.num_calls and not self._content_since_call and not certain.strip():
                return ""
        self._content_since_call = self._content_since_call or bool(certain)
        return certain

    def _read_calls(self, text: str, last: bool) -> tuple[list[ParsedToolCall], str] | None:
        """Returns the calls at the start of `text` and the text after them, or None if no call is complete."""
        end = self._format.end
        if end is None:
            calls = self._parse_calls(text) if last else None
            return None if calls is None else (calls, "")
        position = text.find(end)
        while position >= 0:
            calls = self._parse_calls(text[:position])
            if calls is not None:
                return calls, text[position + len(end) :]
            position = text.find(end, position + 1)  # the marker was inside of an argument
        calls = self._parse_calls(text) if last else None
        return None if calls is None else (calls, "")

    def _parse_calls(self, text: str) -> list[ParsedToolCall] | None:
        """Parses a call, a list of calls, or calls separated by semicolons. Returns None if `text` is anything else."""
        parsed: list[Any] = []
        remaining = text.strip()
        try:
            decoder = json.JSONDecoder(parse_constant=_reject_constant)
            while remaining:
                value, position = decoder.raw_decode(remaining)
                parsed += value if isinstance(value, list) else [value]
                remaining = remaining[position:].lstrip().removeprefix(";").lstrip()
            json.dumps(parsed, ensure_ascii=False).encode()  # raises on an unpaired surrogate
        except (ValueError, RecursionError):
            return None
        calls = [self._to_call(one) for one in parsed]
        return None if not calls or None in calls else [call for call in calls if call is not None]

    def _to_call(self, value: Any) -> ParsedToolCall | None:
        if not isinstance(value, dict):
            return None
        name, arguments = value.get("name"), value.get(self._format.arguments_key, value.get("arguments", {}))
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name) or not isinstance(arguments, dict):
            return None
        if self._format.leading and name not in self._tool_names:
            return None
        # Mistral's templates accept only ids of nine characters.
        call_id = secrets.token_hex(5)[:9] if self._format == MISTRAL else f"call_{secrets.token_hex(12)}"
        return ParsedToolCall(call_id, name, arguments)


def _reject_constant(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


def forced_call_grammar(format: ToolCallFormat, tools: dict[str, dict[str, Any]], marker: int | None) -> str:
    """Returns a Lark grammar for llguidance that accepts exactly one call of one tool, with arguments that match its
    schema.

    `tools`: JSON schema of the arguments by tool name.
    `marker`: id of the special token that begins a call; None if a call begins with the ordinary text `format.begin`.
    """
    brackets = {"[": '"["', "]": '"]"'} if format is MISTRAL else {"[": "", "]": ""}
    begin = f"<[{marker}]>" if marker is not None else format.begin and json.dumps(format.begin)
    newline, end = ('"\\n"', json.dumps(format.end)) if format.end else ("", "")
    parts = (begin, newline, brackets["["], "call", brackets["]"], newline, end)
    lines = [
        f"start: {' '.join(filter(None, parts))}",
        f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}",
    ]
    for index, (name, schema) in enumerate(tools.items()):  # one rule per schema, since a schema can refer to its root
        prefix = json.dumps(f'{{"name": {json.dumps(name)}, "{format.arguments_key}": ')
        lines.append(f'call_{index}: {prefix} values_{index} "}}"')
        lines.append(f"values_{index}: %json {json.dumps(schema or {'type': 'object'})}")
    return "\n".join(lines)
