"""Tool calls in each format, independent of how the text is split; text that is not a call is content."""

from __future__ import annotations

import json

import llguidance
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swiftspec.serve.http.format.tools import (
    HERMES,
    LLAMA,
    MISTRAL,
    ToolCallFormat,
    ToolCallParser,
    detect_tool_format,
    forced_call_grammar,
)
from swiftspec.serve.http.grammar import build_grammar

ONE, OTHER = '{"name": "f", "arguments": {"a": "</tool_call>"}}', '{"name": "g", "arguments": {}}'
CASES = [
    (HERMES, f"Hm. \n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{OTHER}</tool_call>\n", "Hm.", ["f", "g"]),
    (HERMES, f"<tool_call>{ONE}</tool_call> and so", " and so", ["f"]),
    (HERMES, f"a <tool_call>{OTHER}", "a", ["g"]),
    (HERMES, "a < b <tool_call>no</tool_call> c ", "a < b<tool_call>no</tool_call> c ", []),
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


def read(format: ToolCallFormat, text: str, cuts: list[int]) -> tuple[str, list[str], list[str]]:
    calls, content, found, at = ToolCallParser(format, ("f", "g")), "", [], 0
    for end in sorted({min(cut, len(text)) for cut in cuts}):
        more = calls.push(text[at:end])
        content, at = content + more[0], end
        found += more[1]
    more = calls.push(text[at:], last=True)
    found += more[1]
    return content + more[0], [call.name for call in found], [call.arguments_json for call in found]


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
    assert read(HERMES, text, list(range(len(text)))) == read(HERMES, text, [])


def test_a_call_is_returned_when_it_is_complete() -> None:
    calls = ToolCallParser(HERMES, ())
    assert calls.push(f"a <tool_call>{OTHER}</tool_cal") == ("a", [])
    content, found = calls.push("l>")
    assert (content, [call.name for call in found], calls.num_calls) == ("", ["g"], 1)
    assert found[0].id.startswith("call_")
    assert len(ToolCallParser(MISTRAL, ()).push(f"[TOOL_CALLS][{OTHER}]", last=True)[1][0].id) == 9


def test_the_format_is_detected_from_the_template() -> None:
    assert detect_tool_format("{% if tools %}<tool_call>{% endif %}") is HERMES
    assert detect_tool_format("{{ tools }} [TOOL_CALLS]") is MISTRAL
    for shape in ('{"name": function name, "parameters": dictionary}', r"{\"name\": x, \"parameters\": y}"):
        assert detect_tool_format("{{ tools }} " + shape) is LLAMA
    for other in ("{{ tools }}", "<tool_call>", "{{ tools }} <tool_call><function=f>", "{{ tools['parameters'] }}"):
        assert detect_tool_format(other) is None


@pytest.mark.parametrize("format", [HERMES, MISTRAL, LLAMA])
def test_the_grammar_of_a_forced_call_accepts_what_the_parser_accepts(format: ToolCallFormat) -> None:
    """The grammar accepts a call exactly if the parser does."""
    bytes_only = llguidance.LLTokenizer("byte")
    schema = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
    grammar = build_grammar("lark", forced_call_grammar(format, {"f": schema, "g": {}}, None))

    def takes(value: object) -> bool:
        matcher = llguidance.LLMatcher(bytes_only, grammar)
        one = json.dumps([value] if format is MISTRAL else value)
        text = f"{format.begin}\n{one}\n{format.end}" if format.end else format.begin + one
        taken = matcher.try_consume_tokens(list(text.encode()))
        return taken == len(text.encode()) and matcher.is_accepting()

    assert takes({"name": "f", format.arguments_key: {"n": 1}})
    assert not takes({"name": "f", format.arguments_key: {"n": "one"}})
    assert takes({"name": "g", format.arguments_key: {"x": [1]}})
    assert not takes({"name": "h", format.arguments_key: {}})
