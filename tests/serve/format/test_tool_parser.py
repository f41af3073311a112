"""Tool calls in the syntax of each class of chat template: derived from the template, read however the text is split,
and accepted by the grammar; text that is not a call is content."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftspec.sampling.grammar_process import build_grammar
from swiftspec.serve.format.template_format import TemplateFormat, derive_template_format, with_written_calls
from swiftspec.serve.format.tool_format import ToolCallFormat
from swiftspec.serve.format.tool_grammar import tool_call_grammar
from swiftspec.serve.format.tool_parser import AllowedText, ParsedToolCall, ToolCallParser
from tests.support.cases import examples
from tests.support.grammars import accepts
from tests.support.tool_templates import TEMPLATES, rendering

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "s": {"type": "string"}, "t": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "n": {"$ref": "#/$defs/n"},
        "x": {"type": "number"}, "b": {"type": "boolean"}, "o": {"type": "object"}, "l": {"type": "array"},
    },
    "required": ["s"],
    "$defs": {"n": {"type": "integer"}},
}  # fmt: skip
TOOLS: dict[str, Any] = {"f": SCHEMA, "g.h-2": {"type": "object", "properties": {}}}
OFFERED = [{"type": "function", "function": {"name": n, "description": "", "parameters": p}} for n, p in TOOLS.items()]
HERMES, BARE = "hermes", "bare json"
Call = tuple[str, dict[str, Any]]


@cache
def derived(name: str) -> TemplateFormat:
    template = TEMPLATES[name]
    return derive_template_format(lambda *probe: rendering(template, *probe), template, {})


@cache
def syntax(name: str) -> ToolCallFormat:
    found = derived(name)
    assert found.tool_calls is not None, found.reason
    return found.tool_calls


def written(name: str, calls: list[Call], content: str = "") -> str:
    """The answer with calls, as the template writes it."""
    listed = [
        {"id": f"abcdef00{at}", "type": "function", "function": {"name": tool, "arguments": arguments}}
        for at, (tool, arguments) in enumerate(calls)
    ]
    messages: list[dict[str, Any]] = [{"role": "assistant", "content": content, "tool_calls": listed}]
    writer = derived(name).write_calls
    if writer is not None:
        messages = with_written_calls(messages, writer)
    text = rendering(TEMPLATES[name], messages, None, False)
    return text.removeprefix("<|assistant|>").removesuffix("<|end|>")


def read(format: ToolCallFormat, text: str, cuts: list[int], allowed: AllowedText = "any") -> list[str | Call]:
    """What a text that comes in pieces is read as, with adjacent content joined."""
    parser, at = ToolCallParser(format, TOOLS, allowed), 0
    parts: list[str | ParsedToolCall] = []
    for end in sorted({min(cut, len(text)) for cut in cuts}):
        parts += parser.push(text[at:end])
        at = end
    out: list[str | Call] = []
    for part in parts + parser.push(text[at:], last=True):
        if isinstance(part, str) and out and isinstance(out[-1], str):
            out[-1] += part
        else:
            out.append(part if isinstance(part, str) else (part.name, part.arguments))
    return out


TEXT = st.text(st.sampled_from(list("ab \n\"'\\{}[]()<>&,:=é😀.")), max_size=12) | st.sampled_from(
    ["</parameter>", "<tool_call>", "]]>", "3", "true", "null", "[TOOL_CALLS]", "\n x \n"]
)
# Quotes that a template does not escape cannot be read back; those of Python's syntax are of this kind.
QUOTED = {"python": "'\\", "other quotes": ""}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(-(10**9), 10**9),
    "x": st.floats(-1e6, 1e6, allow_nan=False),
    "b": st.booleans(),
    "o": st.dictionaries(st.sampled_from("kq"), TEXT | st.integers() | st.none() | st.booleans(), max_size=2),
    "l": st.lists(st.integers() | st.text("abé ", max_size=4), max_size=3),
}
ARGUMENTS = st.fixed_dictionaries({"s": TEXT}, optional=VALUES)
CALLS = st.lists(st.tuples(st.just("f"), ARGUMENTS) | st.just(("g.h-2", {})), min_size=1, max_size=3)


def can_write(name: str, calls: list[Call]) -> bool:
    """Whether the template writes these calls so that they can be read."""
    texts = [str(each) for _, arguments in calls for each in arguments.values()]
    return not any(mark in text for mark in QUOTED.get(name, "") for text in texts)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=examples(10))
@given(data=st.data(), calls=CALLS, content=st.sampled_from(["", "Hm.", "a < b [ {x}"]), step=st.integers(1, 7))
def test_written_calls_are_read_back_in_every_split(
    name: str, data: st.DataObject, calls: list[Call], content: str, step: int
) -> None:
    if name == BARE:
        calls, content = calls[:1], ""
    if not can_write(name, calls):
        return
    text = written(name, calls, content)
    expected = [*([content] if content else []), *calls]
    assert read(syntax(name), text, []) == expected
    assert read(syntax(name), text, list(range(0, len(text), step))) == expected
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    assert read(syntax(name), text, cuts) == expected


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=examples(12))
@given(data=st.data())
def test_any_text_is_read_alike_in_every_split_and_stays_if_it_is_no_call(name: str, data: st.DataObject) -> None:
    format = syntax(name)
    call = written(name, [("f", {"s": "v", "b": True})])
    pieces = [*filter(None, format.literals), call, call[:-3], call[len(call) // 2 :], "{", '"', " ", "\n", "f", "a"]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=7)))
    whole = read(format, text, [])
    assert read(format, text, list(range(len(text)))) == whole
    if not any(isinstance(part, tuple) for part in whole):
        assert "".join(part for part in whole if isinstance(part, str)) == text


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (HERMES, '<tool_call>{"name": "f", "parameters": {"s": "1"}}</tool_call>', [("f", {"s": "1"})]),
        (HERMES, '<tool_call>{"arguments": {"s": "1"}, "name": "f"}', [("f", {"s": "1"})]),
        (HERMES, '<tool_call>[{"name": "f"}, {"name": "g.h-2"}]</tool_call>', [("f", {}), ("g.h-2", {})]),
        (HERMES, 'a <tool_call> no\n<tool_call>{"name": "f"}</tool_call> b', ["a <tool_call> no", ("f", {}), " b"]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"x": 1e400}}</tool_call> ', None),
        (HERMES, '<tool_call>{"name": "f\\ud800"}</tool_call>', None),
        (HERMES, "<tool_call>[]</tool_call>", None),
        (BARE, '\n{"name": "f", "parameters": {}}; {"name": "g.h-2", "arguments": {}}', [("f", {}), ("g.h-2", {})]),
        (BARE, '{"name": "unknown", "parameters": {}}', None),
        (BARE, 'no: {"name": "f", "parameters": {}}', None),
        (BARE, '{"a": NaN}', None),
        ("json list", '<TOOLS>{"tool_name": "f", "parameters": "{\\"s\\": \\"1\\"}"}</TOOLS>', [("f", {"s": "1"})]),
        ("tags with newlines", "<function=f><parameter=s>3</parameter></function>", [("f", {"s": "3"})]),
        ("tags with newlines", "<tool_call><function=f>\n<parameter=t>\nnull\n</parameter>\n<parameter=n> 3 "
         "</parameter>\n</function></tool_call>", [("f", {"t": None, "n": 3})]),
        ("tags with newlines", "<tool_call>\n<function=f>\n<parameter=s>\na\n</parameter>\nb", None),
        ("python", '<|call|>[f(s="it\'s \\"q\\"\\n", b=True, o={\'k\': None})]<|/call|>',
         [("f", {"s": 'it\'s "q"\n', "b": True, "o": {"k": None}})]),
        ("attributes", '<calls><invoke name="g.h-2"><param name="a" string="true">3</param><param name="b" '
         'string="false">3</param></invoke></calls>', [("g.h-2", {"a": "3", "b": 3})]),
        ("marked arguments", '[TOOL_CALLS]f[ARGS]{"s": "1"}', [("f", {"s": "1"})]),
    ],
)  # fmt: skip
def test_what_models_write_beside_the_template(name: str, text: str, expected: list[str | Call] | None) -> None:
    for cuts in ([], list(range(len(text)))):
        assert read(syntax(name), text, cuts) == ([text] if expected is None else expected)


def test_ids_are_those_that_the_template_accepts() -> None:
    for name, pattern in (("short ids", 9), (HERMES, 29)):
        (call,) = ToolCallParser(syntax(name), TOOLS).push(written(name, [("f", {})]), last=True)
        assert isinstance(call, ParsedToolCall) and len(call.id) == pattern
    calls = ToolCallParser(syntax("counted"), TOOLS).push(written("counted", [("f", {}), ("g.h-2", {})]), last=True)
    assert [part.id for part in calls if isinstance(part, ParsedToolCall)] == ["functions.f:0", "functions.g.h-2:1"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_forced_call_that_is_cut_is_no_content_and_keeps_its_arguments(name: str) -> None:
    text = written(name, [("f", {"s": "value", "n": 12})])
    kept: set[str] = set()
    for length in range(len(text)):
        assert all(isinstance(part, tuple) for part in read(syntax(name), text[:length], [length // 2], "calls"))
        parser = ToolCallParser(syntax(name), TOOLS, "calls", keep_cut_call=True)
        for part in parser.push(text[:length], last=True):
            assert isinstance(part, ParsedToolCall) and part.name == "f"
            kept.add(part.arguments_json)
    assert any(json_text.startswith("{") and not json_text.endswith("}") for json_text in kept), kept


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != BARE])
def test_a_text_of_either_calls_or_an_answer(name: str) -> None:
    """As the grammar of a format beside tools accepts it: calls have no content, and an answer has no calls."""
    call = written(name, [("f", {"s": "1"})]).strip()
    answer = json.dumps({"a": call})
    for text, expected in ((answer, [answer]), (call, [("f", {"s": "1"})]), ("", [])):
        for cuts in ([], list(range(len(text)))):
            assert read(syntax(name), text, cuts, "calls_or_answer") == expected


def without_ids(text: str) -> str:
    """A text without the ids in JSON, which forced calls lack."""
    return re.sub(', "id": "[a-z0-9]+"', "", text.strip())


GOOD: list[dict[str, Any]] = [{"s": "a<b> c"}, {"s": "1", "n": 3}, {"s": "", "t": "u", "x": 1.5, "b": True, "l": [1]}]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_grammar_accepts_calls_that_match_their_schemas(name: str) -> None:
    format = syntax(name)
    grammar = build_grammar("lark", tool_call_grammar(format, TOOLS, {}, None, single=False))
    one = build_grammar("lark", tool_call_grammar(format, TOOLS, {}))

    def text_of(*calls: Call) -> str:
        text = without_ids(written(name, list(calls)))
        return text.replace("True", "true").replace("'", '"')  # of Python: the grammar has JSON

    for arguments in GOOD:
        assert accepts(one, text_of(("f", arguments))), text_of(("f", arguments))
    assert accepts(one, text_of(("g.h-2", {})))
    assert not accepts(one, text_of(("h", {})))
    assert not accepts(one, text_of(("f", {"s": "1", "n": "one"})))
    assert not accepts(one, text_of(("f", {"n": 1}))), "s is required"
    if name != BARE:
        several = text_of(("f", {"s": "1"}), ("g.h-2", {}))
        assert accepts(grammar, several) and not accepts(one, several)


def test_the_grammar_has_special_tokens_by_id_and_enumerations() -> None:
    tools = {"f": {"type": "object", "properties": {"s": {"enum": ["red", "blue"]}}, "required": ["s"]}}
    grammar = tool_call_grammar(syntax("key and value tags"), tools, {"<tool_call>": 7, "</arg_value>": 8, "zz": 9})
    assert "<[7]>" in grammar and "<[8]>" in grammar and "<[9]>" not in grammar
    built = build_grammar("lark", tool_call_grammar(syntax("tags with newlines"), tools, {}))
    for value, good in (("red", True), ("green", False)):
        assert accepts(built, written("tags with newlines", [("f", {"s": value})]).strip()) is good


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_grammar_of_an_answer_beside_calls(name: str) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    answer = schema | {"additionalProperties": False}
    tools = {"f": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}
    for single in (True, False):
        grammar = build_grammar("lark", tool_call_grammar(syntax(name), tools, {}, answer, single))
        assert accepts(grammar, '{"name": "Bob"}') and not accepts(grammar, '{"n": 1}')
        assert accepts(grammar, without_ids(written(name, [("f", {"n": 1})])))
        assert not accepts(grammar, '{"name":' + " " * 40 + '"Bob"}'), "white space is bounded"
