"""Tool calls in each format, independent of how the text is split; text that is not a call is content."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swiftspec.sampling.grammar_process import build_grammar
from swiftspec.serve.http.format.tools import (
    HERMES,
    LLAMA,
    MISTRAL,
    AllowedText,
    ParsedToolCall,
    ToolCallFormat,
    ToolCallParser,
    detect_tool_format,
    tool_call_grammar,
)
from tests.support.grammars import accepts

ONE, OTHER = '{"name": "f", "arguments": {"a": "</tool_call>"}}', '{"name": "g", "arguments": {}}'
OVERFLOW = '{"name": "f", "arguments": {"a": 1e400}}'  # valid JSON that would be written as Infinity
CASES = [
    (HERMES, f"Hm. \n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{OTHER}</tool_call>\n", "Hm.", ["f", "g"]),
    (HERMES, f"<tool_call>{ONE}</tool_call> and so", " and so", ["f"]),
    (HERMES, f"a <tool_call>{OTHER}", "a", ["g"]),
    (HERMES, "a < b <tool_call>no</tool_call> c ", "a < b <tool_call>no</tool_call> c ", []),
    (HERMES, "Use\n\n<tool_call> tags.", "Use\n\n<tool_call> tags.", []),
    (HERMES, f"The <tool_call> tag: <tool_call>{OTHER}</tool_call>", "The <tool_call> tag:", ["g"]),
    (HERMES, f"<tool_call>{OTHER}</tool_call>\n <tool_call>{{", "\n <tool_call>{", ["g"]),
    (HERMES, f"<tool_call>{OVERFLOW}</tool_call> ", f"<tool_call>{OVERFLOW}</tool_call> ", []),
    (MISTRAL, f"So: [TOOL_CALLS] [{OVERFLOW}]", f"So: [TOOL_CALLS] [{OVERFLOW}]", []),
    (LLAMA, ' {"name": "f", "parameters": {"a": -1e999}}', ' {"name": "f", "parameters": {"a": -1e999}}', []),
    (HERMES, "nothing \n", "nothing \n", []),
    (HERMES, '<tool_call>{"name": "f\\ud800"}</tool_call>', '<tool_call>{"name": "f\\ud800"}</tool_call>', []),
    (HERMES, "<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", []),
    (MISTRAL, f"So: [TOOL_CALLS][{ONE}, {OTHER}]", "So:", ["f", "g"]),
    (MISTRAL, "[TOOL_CALLS][", "[TOOL_CALLS][", []),
    (LLAMA, '\n{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "", ["f", "g"]),
    (LLAMA, '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    (LLAMA, '{"a": NaN}', '{"a": NaN}', []),
    (LLAMA, 'no: {"name": "f", "parameters": {}}', 'no: {"name": "f", "parameters": {}}', []),
]


def read(
    format: ToolCallFormat, text: str, cuts: list[int], allowed: AllowedText = "any"
) -> tuple[str, list[str], list[str]]:
    parts = split_parts(format, text, cuts, allowed)
    calls = [part for part in parts if not isinstance(part, str)]
    content = "".join(part for part in parts if isinstance(part, str))
    return content, [call.name for call in calls], [call.arguments_json for call in calls]


def split_parts(
    format: ToolCallFormat, text: str, cuts: list[int], allowed: AllowedText = "any"
) -> list[str | ParsedToolCall]:
    """The parts of a text that is pushed in pieces."""
    parser, at = ToolCallParser(format, ("f", "g"), allowed), 0
    parts: list[str | ParsedToolCall] = []
    for end in sorted({min(cut, len(text)) for cut in cuts}):
        parts += parser.push(text[at:end])
        at = end
    return parts + parser.push(text[at:], last=True)


@pytest.mark.parametrize(("format", "text", "content", "names"), CASES)
def test_each_format(format: ToolCallFormat, text: str, content: str, names: list[str]) -> None:
    assert read(format, text, [])[:2] == (content, names)


@given(st.sampled_from(CASES), st.lists(st.integers(0, 160), max_size=160))
def test_the_result_does_not_depend_on_the_split(
    case: tuple[ToolCallFormat, str, str, list[str]], cuts: list[int]
) -> None:
    assert read(case[0], case[1], cuts) == read(case[0], case[1], [])


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", ONE, " ", "\n", "a", "<tool", "{"]), max_size=9))
@example(["<tool_call>", ONE, "</tool_call>", "</tool_call>", " "])
def test_any_text_in_single_characters(words: list[str]) -> None:
    text = "".join(words)
    content, names, arguments = read(HERMES, text, list(range(len(text))))
    assert (content, names, arguments) == read(HERMES, text, [])
    assert names or content == text, "text without a call is returned unchanged"


def test_content_and_calls_keep_their_order() -> None:
    text = f"a <tool_call>{ONE}</tool_call> b <tool_call> c\n<tool_call>{OTHER}</tool_call> d"
    for cuts in ([], list(range(len(text)))):
        order: list[str] = []
        for part in split_parts(HERMES, text, cuts):
            if isinstance(part, str) and order and order[-1] not in "fg":
                order[-1] += part
            else:
                order.append(part if isinstance(part, str) else part.name)
        assert order == ["a", "f", " b <tool_call> c", "g", " d"]


@pytest.mark.parametrize("format", [HERMES, MISTRAL, LLAMA])
def test_a_forced_call_that_is_cut_is_no_content(format: ToolCallFormat) -> None:
    whole = f"{format.begin}\n{OTHER.replace('arguments', format.arguments_key)}"
    for length in range(len(whole)):
        parser = ToolCallParser(format, ("g",), "calls")
        assert parser.push(whole[: length // 2]) + parser.push(whole[length // 2 : length], last=True) == []


@pytest.mark.parametrize(("format", "first"), [(HERMES, ""), (MISTRAL, f"[{ONE}, "), (LLAMA, "")])
def test_a_forced_call_that_is_cut_is_kept_from_its_arguments_on(format: ToolCallFormat, first: str) -> None:
    call = OTHER.replace("arguments", format.arguments_key)
    before, begin = f"{format.begin}\n{first}", call.index(": {") + 1
    whole = f"{before}{call}\n</tool_c"
    for length in range(len(whole)):
        parts = ToolCallParser(format, ("f", "g"), "calls", keep_cut_call=True).push(whole[:length], last=True)
        calls = [part for part in parts if isinstance(part, ParsedToolCall)]
        assert len(calls) == len(parts), "no content"
        generated = whole[len(before) : length]
        expected = ["g"] * (len(generated) >= begin)
        assert [part.name for part in calls if part.name == "g"] == expected
        if expected:
            assert calls[-1].arguments_json == generated[begin:].strip() if len(generated) < len(call) else "{}"
            assert (calls[-1].cut_json is None) == (len(generated) >= len(call))
            assert [part.cut_json for part in calls[:-1]] == [None] * bool(first)


@pytest.mark.parametrize("format", [HERMES, MISTRAL])
def test_a_text_of_either_calls_or_an_answer(format: ToolCallFormat) -> None:
    """As the grammar of a format beside tools accepts it: calls have no content, and an answer has no calls."""
    answer = json.dumps({"a": f"{format.begin}{OTHER}{format.end or ''}"})
    call = f"{format.begin}{OTHER}{format.end}" if format.end else f"{format.begin}[{OTHER}]"
    for text, content, names in (
        (answer, answer, []),
        (f"{call}\n{format.begin}" if format.end else call, "", ["g"]),
        (format.begin[:-2], "", []),
        ("", "", []),
    ):
        for cuts in ([], range(len(text))):
            assert read(format, text, [*cuts], "calls_or_answer")[:2] == (content, names), text


def test_a_call_is_returned_when_it_is_complete() -> None:
    calls = ToolCallParser(HERMES, ())
    assert calls.push(f"a <tool_call>{OTHER}</tool_cal") == ["a"]
    (found,) = calls.push("l>")
    assert isinstance(found, ParsedToolCall) and found.name == "g" and calls.num_calls == 1
    assert found.id.startswith("call_")
    (found,) = ToolCallParser(MISTRAL, ()).push(f"[TOOL_CALLS][{OTHER}]", last=True)
    assert isinstance(found, ParsedToolCall) and len(found.id) == 9
    assert ToolCallParser(HERMES, ()).push("a <tool_call> t") == ["a <tool_call> t"], "it cannot become a call"


def test_the_format_is_detected_from_the_template() -> None:
    assert detect_tool_format("{% if tools %}<tool_call>{% endif %}") is HERMES
    assert detect_tool_format("{{ tools }} [TOOL_CALLS]") is MISTRAL
    for shape in ('{"name": function name, "parameters": dictionary}', r"{\"name\": x, \"parameters\": y}"):
        assert detect_tool_format("{{ tools }} " + shape) is LLAMA
    for other in ("{{ tools }}", "<tool_call>", "{{ tools }} <tool_call><function=f>", "{{ tools['parameters'] }}"):
        assert detect_tool_format(other) is None


N: dict[str, Any] = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}


def call_text(format: ToolCallFormat, value: object) -> str:
    one = json.dumps([value] if format is MISTRAL else value)
    return f"{format.begin}\n{one}\n{format.end}" if format.end else format.begin + one


@pytest.mark.parametrize("format", [HERMES, MISTRAL, LLAMA])
def test_the_grammar_of_a_forced_call_accepts_what_the_parser_accepts(format: ToolCallFormat) -> None:
    """The grammar accepts a call exactly if the parser does."""
    grammar = build_grammar("lark", tool_call_grammar(format, {"f": N, "g": {}}, None))

    def takes(value: object) -> bool:
        return accepts(grammar, call_text(format, value))

    assert takes({"name": "f", format.arguments_key: {"n": 1}})
    assert not takes({"name": "f", format.arguments_key: {"n": "one"}})
    assert takes({"name": "g", format.arguments_key: {"x": [1]}})
    assert not takes({"name": "h", format.arguments_key: {}})
    text = call_text(format, {"name": "f", format.arguments_key: {"n": 1}})
    assert not accepts(grammar, text.replace(": 1", ":" + " " * 40 + "1")), "white space is bounded"


@pytest.mark.parametrize("format", [HERMES, MISTRAL, LLAMA])
def test_the_grammar_of_an_answer_beside_calls(format: ToolCallFormat) -> None:
    """The answer has a schema; a call is accepted instead of it."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    tools, schema = {"f": N, "g": {}}, schema | {"additionalProperties": False}
    call = {"name": "f", format.arguments_key: {"n": 1}}
    for single in (True, False):
        grammar = build_grammar("lark", tool_call_grammar(format, tools, None, schema, single))
        assert accepts(grammar, '{"name": "Bob"}') and not accepts(grammar, '{"n": 1}')
        assert accepts(grammar, call_text(format, call))
        assert not accepts(grammar, call_text(format, {**call, format.arguments_key: {"n": ""}}))
        assert not accepts(grammar, '{"name":' + " " * 40 + '"Bob"}')
    several = "\n".join([call_text(HERMES, {"name": "g", "arguments": {}})] * 2)
    assert accepts(grammar, several) is (format is HERMES)
