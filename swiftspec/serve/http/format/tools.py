"""Tool-call parsing: finds tool calls in generated text, in the formats of Hermes, Mistral and Llama."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from swiftspec.sampling.grammar_process import ANY_OBJECT, bound_whitespace
from swiftspec.serve.http.format.reasoning import partial_marker_length

TOOL_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond the range of a float")
    return value


def _reject_constant(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


# Rejects NaN and infinities, also numbers such as 1e400, which would be written as Infinity.
STRICT_JSON = json.JSONDecoder(parse_constant=_reject_constant, parse_float=_finite_float)


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """Tool call in generated text.

    `arguments`: values by parameter name; empty if the call was cut.
    `cut_json`: the text of the arguments as far as it was generated, if a limit cut the call; else None.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    cut_json: str | None = None

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON, which is incomplete if the call was cut."""
        return json.dumps(self.arguments, ensure_ascii=False) if self.cut_json is None else self.cut_json


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
CUT_CALL = r"""\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"KEY"\s*:\s*"""  # a call up to its arguments
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


AllowedText = Literal["any", "calls", "answer", "calls_or_answer"]


class ToolCallParser:
    """Parser that separates tool calls from content in streamed text. A call is returned when it is complete. Text that
    turns out not to be a call is returned as content, unchanged; blanks next to a call are dropped.

    `tool_names`: names of the available tools. In a format without markers, a JSON object is a call only if its name is
        one of these.
    `allowed`: what a grammar restricts the text to, either calls or an answer without calls. Text with calls has no
        content then.
    `keep_cut_call`: whether a call that a limit cut after its name is returned if a grammar restricts the text to
        calls; otherwise it is dropped.
    """

    def __init__(
        self, format: ToolCallFormat, tool_names: Collection[str], allowed: AllowedText = "any",
        keep_cut_call: bool = False,
    ) -> None:  # fmt: skip
        self._format, self._tool_names, self._allowed = format, tool_names, allowed
        self._keep_cut_call = keep_cut_call
        self._buffer = ""
        self._in_call = False
        self._blanks_before_call = ""  # dropped if the text after the marker is a call
        self._searched = 0  # characters of the buffer in which each end marker was tried
        self._has_content = False
        self._content_since_call = False  # content was returned since the last call
        self.num_calls = 0

    def push(self, text: str, last: bool = False) -> list[str | ParsedToolCall]:
        """Adds text. Returns the new content and the calls that later text cannot change, in their order. `last`: no
        text follows, so that all buffered text is returned."""
        self._buffer += text
        parts: list[str | ParsedToolCall] = []
        if self._allowed == "calls_or_answer":
            self._allowed = self._first_kind(last)
        if self._allowed == "calls_or_answer":
            return parts
        if self._allowed == "answer":
            self._append_content(parts, self._buffer)
            self._buffer = ""
            return parts
        while True:
            if not self._in_call:
                self._append_content(parts, self._read_content(last))
                if not self._in_call:
                    return parts
            no_call = self._blanks_before_call + self._format.begin
            if self._begins_unlike_a_call():
                self._append_content(parts, no_call)  # the text after the marker is read again: a call can follow
            elif (calls := self._read_calls(last)) is not None:
                parts += calls
                self._content_since_call = False
                self.num_calls += len(calls)
            elif last and self._allowed == "calls":
                parts += self._read_cut_calls() if self._keep_cut_call else []
                self._buffer = ""
            elif last:  # the call is not closed, or is not JSON
                self._append_content(parts, no_call + self._buffer)
                self._buffer = ""
            else:
                return parts
            self._in_call, self._blanks_before_call, self._searched = False, "", 0

    def _first_kind(self, last: bool) -> AllowedText:
        """Returns whether the text begins with a call or with an answer; the argument of the parser while both are
        possible."""
        text, begin = self._buffer, self._format.begin
        if not begin:
            return "any"
        if text.startswith(begin) or (last and text and begin.startswith(text)):
            return "calls"
        return "calls_or_answer" if begin.startswith(text) and not last else "answer"

    def _append_content(self, parts: list[str | ParsedToolCall], content: str) -> None:
        if not content or self._allowed == "calls":
            return
        self._content_since_call = True
        if parts and isinstance(parts[-1], str):
            parts[-1] += content
        else:
            parts.append(content)

    def _begins_unlike_a_call(self) -> bool:
        """Returns whether the text after a marker does not begin with a JSON object or list."""
        begin = self._buffer.lstrip()[:1]
        return bool(self._format.begin and begin) and begin not in "{["

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
            content = before.rstrip()
            self._blanks_before_call = before[len(content) :]
            return content
        certain = before if last else before[: len(before) - partial_marker_length(before, self._format.begin)].rstrip()
        self._buffer = before[len(certain) :]
        if last:
            self._buffer = ""
            if self.num_calls and not self._content_since_call and not certain.strip():
                return ""
        return certain

    def _read_calls(self, last: bool) -> list[ParsedToolCall] | None:
        """Removes the calls at the start of the buffer and returns them, or None if no call is complete."""
        text, end = self._buffer, self._format.end
        position = -1 if end is None else text.find(end, self._searched)
        while end is not None and position >= 0:
            calls = self._parse_calls(text[:position])
            if calls is not None:
                self._buffer = text[position + len(end) :]
                return calls
            position = text.find(end, position + 1)  # the marker was inside of an argument
        self._searched = max(0, len(text) - len(end or "") + 1)
        calls = self._parse_calls(text) if last else None
        if calls is not None:
            self._buffer = ""
        return calls

    def _read_cut_calls(self) -> list[ParsedToolCall]:
        """Returns the calls of the buffer, of which the last one is cut."""
        complete: list[ParsedToolCall] = []
        text = self._buffer.lstrip("[ \n")
        while (call := self._first_call(text)) is not None:
            complete.append(call[0])
            text = text[call[1] :].lstrip(",; \n")
        if (begin := re.match(CUT_CALL.replace("KEY", self._format.arguments_key), text)) is None:
            return complete
        return [*complete, ParsedToolCall(self._new_id(), begin[1], {}, cut_json=text[begin.end() :])]

    def _first_call(self, text: str) -> tuple[ParsedToolCall, int] | None:
        """Returns the complete call at the start of `text` and its length, or None."""
        try:
            value, length = STRICT_JSON.raw_decode(text)
        except (ValueError, RecursionError):
            return None
        call = self._to_call(value)
        return None if call is None else (call, length)

    def _parse_calls(self, text: str) -> list[ParsedToolCall] | None:
        """Parses a call, a list of calls, or calls separated by semicolons. Returns None if `text` is anything else."""
        parsed: list[Any] = []
        remaining = text.strip()
        try:
            while remaining:
                value, position = STRICT_JSON.raw_decode(remaining)
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
        return ParsedToolCall(self._new_id(), name, arguments)

    def _new_id(self) -> str:
        # Mistral's templates accept only ids of nine characters.
        return secrets.token_hex(5)[:9] if self._format == MISTRAL else f"call_{secrets.token_hex(12)}"


def tool_call_grammar(
    format: ToolCallFormat,
    tools: dict[str, dict[str, Any]],
    marker: int | None,
    answer_schema: dict[str, Any] | None = None,
    single: bool = True,
) -> str:
    """Returns a Lark grammar for llguidance that accepts calls of tools, with arguments that match their schemas.

    `tools`: JSON schema of the arguments by tool name.
    `marker`: id of the special token that begins a call; None if a call begins with the ordinary text `format.begin`.
    `answer_schema`: JSON schema of an answer that is accepted instead of calls; None: only calls are accepted.
    `single`: whether exactly one call is accepted; always so with an `answer_schema` if calls have no marker.
    """
    if answer_schema is not None and not format.begin:
        return f"start: %json {json.dumps(bound_whitespace(_answer_or_call(format, tools, answer_schema)))}"
    begin = f"<[{marker}]>" if marker is not None else format.begin and json.dumps(format.begin)
    if format.end:  # markers around each call
        block, separator, brackets = f'{begin} "\\n" call "\\n" {json.dumps(format.end)}', "\n", ("", "")
        begin = ""
    else:
        block, separator = "call", ", " if format is MISTRAL else "; "
        brackets = ('"["', '"]"') if format is MISTRAL else ("", "")
    more = "" if single else f"({json.dumps(separator)} block)*"
    calls = " ".join(filter(None, (begin, brackets[0], "block", more, brackets[1])))
    lines = [
        f"start: {calls}" if answer_schema is None else f"start: calls | answer\ncalls: {calls}",
        f"block: {block}",
        f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}",
    ]
    for index, (name, schema) in enumerate(tools.items()):  # one rule per schema, since a schema can refer to its root
        prefix = json.dumps(f'{{"name": {json.dumps(name)}, "{format.arguments_key}": ')
        lines.append(f'call_{index}: {prefix} values_{index} "}}"')
        lines.append(f"values_{index}: %json {json.dumps(bound_whitespace(schema or ANY_OBJECT))}")
    if answer_schema is not None:
        lines.append(f"answer: %json {json.dumps(bound_whitespace(answer_schema))}")
    return "\n".join(lines)


def _answer_or_call(
    format: ToolCallFormat, tools: dict[str, dict[str, Any]], answer_schema: dict[str, Any]
) -> dict[str, Any]:
    """Returns a JSON schema that accepts an answer, or a call of a tool in a format without markers. In a grammar with
    separate rules, the beginning of a call would exclude an answer that begins like it."""
    schemas = {
        "answer": answer_schema,
        **{f"values_{at}": schema or ANY_OBJECT for at, schema in enumerate(tools.values())},
    }
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, format.arguments_key: {"$ref": f"#/$defs/values_{at}"}},
            "required": ["name", format.arguments_key],
            "additionalProperties": False,
        }
        for at, name in enumerate(tools)
    ]
    definitions = {name: _moved(schema, f"#/$defs/{name}") for name, schema in schemas.items()}
    return {"anyOf": [*calls, {"$ref": "#/$defs/answer"}], "$defs": definitions}


def _moved(schema: Any, root: str) -> Any:
    """Returns a JSON schema whose references to its own root point to `root`."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, root) for name, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved
