"""Derivation of what a chat template shows of a model: the syntax of tool calls and of reasoning. Probe conversations
are rendered, and the differences between the results are read.

A derived syntax is used only if the probes' own calls are read back from their renderings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from swiftspec.errors import UserError
from swiftspec.serve.format.call_reader import STRICT_JSON
from swiftspec.serve.format.reasoning import THINK
from swiftspec.serve.format.tool_format import (
    ATOM,
    COUNT,
    ID,
    ParameterFormat,
    ToolCallFormat,
    common_prefix,
    common_suffix,
    literal_pieces,
)
from swiftspec.serve.format.tool_parser import ParsedToolCall, ToolCallParser

Messages = list[dict[str, Any]]
CallWriter = Callable[[list[Mapping[str, Any]]], str]
Render = Callable[[Messages, list[dict[str, Any]] | None, bool], str]  # messages, tools, add_generation_prompt

NAMES = ("zqtool", "zqother")
USER, CONTENT, REASONING = "zquser", "zqcontent", "zqreasoning"
IDS = ("zqid00001", "zqid00002")
LONG_ID = "call_0123456789abcdef01234567"
ARGUMENTS = ({"zqa": "zqva", "zqb": "zqvb"}, {"zqa": "zqvc", "zqb": "zqvd"})
TYPED: dict[str, Any] = {
    "zqc": "zqve", "zqd": 7310459, "zqe": 8310.5, "zqf": True, "zqg": {"zqh": ["zqvf", 2, False]}, "zqi": ["zqvg", 3],
}  # fmt: skip
TYPES = {"zqc": "string", "zqd": "integer", "zqe": "number", "zqf": "boolean", "zqg": "object", "zqi": "array"}
HARD_TEXT = 'zq"\n  <b>&\u00e9 {x}\nzq'
PROPERTIES = {key: {"type": "string"} for key in ARGUMENTS[0]} | {key: {"type": kind} for key, kind in TYPES.items()}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["zqa"]}
PROBE_TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMA}} for name in NAMES
]


class NotDerivedError(UserError):
    """The syntax of tool calls cannot be read from the template; the message has the reason."""


@dataclass(frozen=True, slots=True)
class TemplateFormat:
    """What a chat template shows of a model.

    `tool_calls`: syntax of its tool calls; None if it has none, or one that is not understood, which `reason` explains.
    `reasoning`: the markers of reasoning; None if there is none.
    `write_calls`: writes the calls of earlier messages, if the template leaves them out.
    """

    tool_calls: ToolCallFormat | None = None
    reason: str = ""
    reasoning: tuple[str, str] | None = None
    write_calls: CallWriter | None = None


def derive_template_format(render: Render, source: str, vocabulary: Mapping[str, int]) -> TemplateFormat:
    """Derives the format of a chat template.

    `render`: renders messages and tools; raises UserError if the template fails.
    `source`: source of the template. `vocabulary`: token ids by token.
    """
    reasoning = _reasoning(render)
    if reasoning is None and (THINK[0] in source or THINK[0] in vocabulary):
        reasoning = THINK
    if "tools" not in source:
        return TemplateFormat(None, "the chat template has no tools", reasoning)
    found, reason = _tool_calls_or_reason(render)
    writer = None if found is not None else call_writer(source, vocabulary)
    if writer is not None:
        found, reason = _tool_calls_or_reason(_with_writer(render, writer))
    return TemplateFormat(found, reason, reasoning, writer if found is not None else None)


def _tool_calls_or_reason(render: Render) -> tuple[ToolCallFormat | None, str]:
    try:
        return _tool_calls(render), ""
    except NotDerivedError as error:
        return None, str(error)


def call_writer(source: str, vocabulary: Mapping[str, int]) -> CallWriter | None:
    """Returns the function that writes tool calls as a model does whose template leaves them out; None if the model is
    not known. These are Granite 3 and LFM2, known by the tokens around calls."""
    if "<|tool_call|>" in source:
        return lambda calls: "<|tool_call|>" + json.dumps(list(calls), ensure_ascii=False)
    if any("<|tool_call_start|>" in where for where in (source, vocabulary)) or "<|tool_list_start|>" in source:
        return lambda calls: f"<|tool_call_start|>[{', '.join(map(_python_call, calls))}]<|tool_call_end|>"
    return None


def _python_call(call: Mapping[str, Any]) -> str:
    arguments = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call["arguments"].items())
    return f"{call['name']}({', '.join(arguments)})"


def with_written_calls(messages: Sequence[Mapping[str, Any]], writer: CallWriter) -> Messages:
    """Returns messages whose tool calls are part of the content."""
    return [
        {**message, "content": message["content"] + writer([call["function"] for call in message["tool_calls"]])}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def _call(number: int, arguments: Mapping[str, Any], call_id: str = "") -> dict[str, Any]:
    function = {"name": NAMES[number], "arguments": dict(arguments)}
    return {"id": call_id or IDS[number], "type": "function", "function": function}


def _conversation(content: str, calls: list[dict[str, Any]] | None = None, **fields: str) -> Messages:
    answer: dict[str, Any] = {"role": "assistant", "content": content, **fields}
    return [{"role": "user", "content": USER}, answer | ({"tool_calls": calls} if calls else {})]


def _reasoning(render: Render) -> tuple[str, str] | None:
    """Returns the markers around the reasoning of an answer, or None if the template does not render it."""
    calls = [_call(0, ARGUMENTS[0])]
    probes = [(field, each) for each in (None, calls) for field in ("reasoning_content", "reasoning", "thinking")]
    for field, each in probes:
        try:
            tools = PROBE_TOOLS if each else None
            text = render(_conversation(CONTENT, each, **{field: REASONING}), tools, False)
            plain = render(_conversation(CONTENT, each), tools, False)
            prompt = render(_conversation("")[:1], tools, True)
        except UserError:
            continue
        before, found, after = text[text.rfind(USER) + len(USER) :].rpartition(REASONING)
        end = min((at for word in (CONTENT, NAMES[0]) if (at := after.find(word)) >= 0), default=0)
        closing = literal_pieces(after[:end])
        if not found or not closing:
            continue
        without = plain[plain.rfind(USER) + len(USER) :]
        opening = literal_pieces(before[len(common_prefix(before, without)) :])
        if without.startswith(before + CONTENT):  # only the prompt opens reasoning
            prompt_end = prompt[prompt.rfind(USER) + len(USER) :]
            open_marker = prompt_end[len(common_prefix(prompt_end, before)) :].strip()
        elif opening:
            open_marker = before[before.rfind(opening[0]) :].strip()
        else:
            open_marker = _unique(literal_pieces(before)[::-1], before, from_end=True)
        is_text = len(ATOM.findall(closing[0])) > 1
        close_marker = after[:end].strip() if is_text else _unique(closing, before + after[:end], from_end=False)
        if open_marker:
            return open_marker, close_marker
    return None


def _unique(pieces: list[str], text: str, *, from_end: bool) -> str:
    """Returns the first piece, with as many more as make it occur only once in `text`."""
    marker = ""
    for piece in pieces:
        marker = piece + marker if from_end else marker + piece
        if text.count(marker) == 1:
            break
    return marker


def check_calls(render: Render, format: TemplateFormat, steps: Sequence[int]) -> None:
    """Reads the calls of probes back in pieces of each number of characters. Raises NotDerivedError if they differ."""
    assert format.tool_calls is not None
    _Probe(_with_writer(render, format.write_calls)).check(format.tool_calls, steps)


def _with_writer(render: Render, writer: CallWriter | None) -> Render:
    """Returns a renderer that writes the calls of messages, which the template leaves out."""
    if writer is None:
        return render
    return lambda messages, tools, begins: render(with_written_calls(messages, writer), tools, begins)


def _tool_calls(render: Render) -> ToolCallFormat:
    """Derives the syntax of tool calls and checks it. Raises NotDerivedError."""
    probe = _Probe(render)
    found = probe.json_calls() or probe.named_calls()
    found = replace(found, id_style=probe.id_style(found))
    probe.check(found)
    return found


class _Probe:
    """Renderings of tool calls by one template. Raises NotDerivedError if it does not render them."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._failure = "the chat template does not render tool calls"
        self._turn_end = self._rendered(_conversation(CONTENT), False).rpartition(CONTENT)[2]
        prompt = self._rendered(_conversation("")[:1], True)
        self._prompt_end = prompt[prompt.rfind(USER) + len(USER) :]
        self.calls = [_call(0, ARGUMENTS[0]), _call(1, ARGUMENTS[1])]
        region = self._region(self.calls)
        if region is None:  # the template takes only one call at a time
            self.calls = self.calls[:1]
            region = self.region(self.calls)
        self._text = self._with_id_placeholders(region)

    def _rendered(self, messages: Messages, begins_answer: bool) -> str:
        try:
            return self._render(messages, PROBE_TOOLS, begins_answer)
        except UserError as error:
            raise NotDerivedError(f"the chat template fails with tools ({error})") from None

    @staticmethod
    def _with_id_placeholders(text: str) -> str:
        return text.replace(IDS[0], ID).replace(IDS[1], ID)

    def region(self, calls: list[dict[str, Any]]) -> str:
        """Returns the text of calls. Raises NotDerivedError if the template does not render them."""
        text = self._region(calls)
        if text is None:
            raise NotDerivedError(self._failure)
        return text

    def _region(self, calls: list[dict[str, Any]]) -> str | None:
        names = [call["function"]["name"] for call in calls]
        found: list[str] = []
        for content in (CONTENT, ""):
            try:
                text = self._render(_conversation(content, calls), PROBE_TOOLS, False)
            except UserError as error:
                self._failure = f"the chat template fails with tool calls ({error})"
                continue
            answer = text[text.rfind(USER) + len(USER) :]
            before, has_content, after = answer.partition(CONTENT)
            if not all(name in answer for name in names) or (content and has_content and names[0] in before):
                continue
            if not has_content:
                after = answer[len(common_prefix(self._prompt_end, answer)) :]
            found.append(self._without_turn_end(after))
        return min(found, key=len, default=None)

    def _without_turn_end(self, text: str) -> str:
        return text[: len(text) - len(common_suffix(text, self._turn_end))].strip()

    def json_calls(self) -> ToolCallFormat | None:
        """Returns the format if calls are JSON objects that contain the name."""
        text, end = self._text, 0
        spans: list[tuple[int, int]] = []
        keys: tuple[str, str] | None = None
        for call in self.calls:
            found = _json_object_around(text, end, call["function"]["name"])
            if found is None:
                return None
            begin, end, value = found
            spans.append((begin, end))
            keys = keys or _json_keys(value)
        if keys is None:
            return None
        opening, closing = text[: spans[0][0]].rstrip(), text[spans[-1][1] :].lstrip()
        if opening.endswith("["):
            begin_all, end_all = opening[:-1].rstrip(), closing.removeprefix("]").lstrip()
            return ToolCallFormat(
                "json", begin_all, end_all, separator=", ", is_list=True, name_key=keys[0], arguments_key=keys[1]
            )
        between = text[spans[0][1] : spans[1][0]] if len(spans) > 1 else None
        parts = _split(text[: spans[0][0]], between, text[spans[-1][1] :])
        return ToolCallFormat("json", *parts, name_key=keys[0], arguments_key=keys[1])

    def named_calls(self) -> ToolCallFormat:
        """Returns the format of calls in which the name precedes the arguments. Raises NotDerivedError."""
        text = self._text
        begins = [text.find(call["function"]["name"]) for call in self.calls]
        ends = [begin + len(call["function"]["name"]) for begin, call in zip(begins, self.calls)]
        limits = [*begins[1:], len(text)]
        spans = [
            _arguments_span(text, end, limit, call["function"]["arguments"])
            for end, limit, call in zip(ends, limits, self.calls)
        ]
        known = [span for span in spans if span is not None]
        if len(known) == len(spans):
            parts = self._call_parts(begins, [end for _, end in known])
            name_end = _counted([text[end:begin] for end, (begin, _) in zip(ends, known)])
            return self._checked_opening(ToolCallFormat("arguments", *parts, name_end=name_end))
        return self._checked_opening(self._parameter_calls(begins, ends))

    def _checked_opening(self, format: ToolCallFormat) -> ToolCallFormat:
        if not format.opening or self._prompt_end.rstrip().endswith(format.opening[-1]):
            raise NotDerivedError("no marker precedes the name of a tool")
        if any(name in literal for name in NAMES for literal in (format.name_end, format.begin, format.call_begin)):
            raise NotDerivedError("the name of a tool occurs twice in a call")
        return format

    def _call_parts(self, begins: list[int], ends: list[int]) -> tuple[str, str, str, str, str]:
        between = self._text[ends[0] : begins[1]] if len(begins) > 1 else None
        return _split(self._text[: begins[0]], between, self._text[ends[-1] :])

    def _parameter_calls(self, begins: list[int], ends: list[int]) -> ToolCallFormat:
        """Returns the format of calls whose arguments are written one by one. Raises NotDerivedError."""
        text = self._text
        last_ends: list[int] = []
        name_ends: list[str] = []
        inner: list[str] = []  # between the first value and the second key
        for end, call in zip(ends, self.calls):
            positions = [end]
            for word in (word for pair in call["function"]["arguments"].items() for word in pair):
                at = text.find(word, positions[-1])
                if at < 0:
                    raise NotDerivedError("the arguments of tool calls are not found in its rendering")
                positions += [at, at + len(word)]
            name_ends.append(text[end : positions[1]])
            inner.append(text[positions[4] : positions[5]])
            last_ends.append(positions[-1])
        value_end = common_prefix(inner[0], text[last_ends[-1] :])
        rest = inner[0][len(value_end) :]
        begin = common_suffix(name_ends[0], rest)
        separator = rest[: len(rest) - len(begin)]
        name_end = _counted([name[: len(name) - len(begin)] for name in name_ends])
        parameters = self._parameter_format(begin, value_end, separator)
        call_ends = [at + len(value_end) for at in last_ends]
        return ToolCallFormat(
            "parameters", *self._call_parts(begins, call_ends), name_end=name_end, parameters=parameters
        )

    def _parameter_format(self, begin: str, value_end: str, separator: str) -> ParameterFormat:
        """Returns the format of single arguments, from a call with an argument of each JSON type."""
        text = self.region([_call(0, TYPED)])
        words = {"zqc": "zqve", "zqd": "7310459", "zqe": r"8310\.5", "zqf": "[tT]rue", "zqg": r"\{", "zqi": r"\["}
        value_begins: dict[str, str] = {}
        for key, kind in TYPES.items():
            found = re.search(rf"{key}([^{{\[]*?)({words[key]})", text, re.DOTALL)
            if found is None or any(other in found[1] for other in TYPES):
                raise NotDerivedError(f"an argument of type {kind} is not found in its rendering")
            value_begins[kind] = found[1]
        has_words = re.search(r"zqf[^{\[]*?True", text) is not None
        string, number = value_begins["string"], value_begins["integer"]
        quote = string[len(number) :] if string.startswith(number) and number != string else ""
        if quote and not value_end.startswith(quote):
            raise NotDerivedError("the quotes of a string are not understood")
        value_end = value_end[len(quote) :]
        if not quote and not value_end.strip():
            raise NotDerivedError("no marker follows the value of an argument")
        return ParameterFormat(begin, value_begins, value_end, separator, quote, has_words)

    def id_style(self, format: ToolCallFormat) -> Literal["any", "short", "name"]:
        """Returns which ids of calls the template accepts."""
        if re.match(f":{COUNT}", format.name_end):
            return "name"
        try:
            self._render(_conversation("", [_call(0, ARGUMENTS[0], LONG_ID)]), PROBE_TOOLS, False)
        except UserError:
            return "short"
        return "any"

    def check(self, format: ToolCallFormat, steps: Sequence[int] = ()) -> None:
        """Reads the calls of probes back, in one piece and in pieces of `steps` characters. Raises NotDerivedError if
        they differ."""
        schemas: dict[str, Any] = dict.fromkeys(NAMES, SCHEMA)
        for calls in (self.calls, [_call(0, {})], [_call(0, TYPED)], [_call(0, {"zqa": HARD_TEXT})]):
            text = self.region(calls)
            expected = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
            for step in (len(text), *steps):
                parser = ToolCallParser(format, schemas)
                parts = [part for at in range(0, len(text), step) for part in parser.push(text[at : at + step])]
                parts += parser.push("", last=True)
                found = [(part.name, part.arguments) for part in parts if isinstance(part, ParsedToolCall)]
                if found != expected or len(found) != len(parts):
                    raise NotDerivedError(f"its tool calls are not understood, such as {text[:80]!r}")


def _json_object_around(text: str, start: int, name: str) -> tuple[int, int, dict[str, Any]] | None:
    """Returns begin, end and value of the JSON object in `text`, from `start` on, that contains a name."""
    at, name_at = text.find("{", start), text.find(name, start)
    while 0 <= at < name_at:
        try:
            value, end = STRICT_JSON.raw_decode(text, at)
        except (ValueError, RecursionError):
            value, end = {}, at
        if end > name_at:
            return at, end, value
        at = text.find("{", at + 1)
    return None


def _json_keys(call: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the keys of name and arguments; the first is empty if the name is the key of the arguments."""
    if call == {NAMES[0]: ARGUMENTS[0]}:
        return "", ""
    names = [key for key, value in call.items() if value == NAMES[0]]
    arguments = [key for key, value in call.items() if value == ARGUMENTS[0]]
    return (names[0], arguments[0]) if names and arguments else None


def _arguments_span(text: str, start: int, limit: int, arguments: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns where the JSON object of arguments is in `text[start:limit]`, or None."""
    at = text.find("{", start, limit)
    while at >= 0:
        try:
            value, end = STRICT_JSON.raw_decode(text, at)
        except (ValueError, RecursionError):
            value, end = None, at
        if value == arguments:
            return at, end
        at = text.find("{", at + 1, limit)
    return None


def _split(opening: str, between: str | None, closing: str) -> tuple[str, str, str, str, str]:
    """Splits what precedes, separates and follows calls. Returns begin and end of all calls, begin and end of each, and
    the separator."""
    if between is None:
        return "", "", opening, closing, ""
    call_end = common_prefix(between, closing)
    rest = between[len(call_end) :]
    call_begin = common_suffix(opening, rest)
    begin = opening[: len(opening) - len(call_begin)]
    return begin, closing[len(call_end) :], call_begin, call_end, rest[: len(rest) - len(call_begin)]


def _counted(literals: list[str]) -> str:
    """Returns a literal of which several calls show a version each, with a placeholder for a number that differs.
    Raises NotDerivedError if more differs."""
    if len(set(literals)) == 1:
        return literals[0]
    counted = {re.sub(r"\d+", COUNT, literal) for literal in literals}
    if len(counted) > 1:
        raise NotDerivedError("the text after the name of a tool differs between calls")
    return counted.pop()
