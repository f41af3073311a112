"""Harmony in the server: reasoning, content and calls independent of the split, the grammar, and the template's
input."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from swiftspec.sampling.grammar_process import build_grammar
from swiftspec.serve.format.harmony import HarmonyParser, harmony_grammar, harmony_messages, harmony_tools
from swiftspec.serve.format.output_parser import OutputPart, OutputText
from swiftspec.serve.format.tool_parser import ParsedToolCall
from swiftspec.text.harmony import MARKER_TOKENS
from tests.support.harmony import EOS, SPECIAL, marked
from tests.support.toy_pair import byte_level_tokenizer

PROMPT = marked("<|start|>assistant")
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "<|call|>"}<|call|>'
ANSWER = "<|channel|>final<|message|>fine"
Read = list[tuple[str, str]]  # kind, and text or name and arguments


def parts_of(text: str, cuts: list[int], tools: tuple[str, ...] | None = ("f", "g"), **options: bool) -> Read:
    parser, at = HarmonyParser(PROMPT, tools, **options), 0
    parts: list[OutputPart] = []
    for end in sorted({min(cut, len(text)) for cut in cuts}):
        parts += parser.push(text[at:end])
        at = end
    out: Read = []
    for part in parts + parser.push(text[at:], last=True):
        if isinstance(part, ParsedToolCall):
            out.append(("call", part.name + part.arguments_json))
        elif out and out[-1][0] == part.kind:
            out[-1] = part.kind, out[-1][1] + part.text
        else:
            out.append((part.kind, part.text))
    return out


CASES: list[tuple[str, Read]] = [
    (THOUGHT + ANSWER, [("reasoning", "hm"), ("content", "fine")]),
    (f"{THOUGHT}<|channel|>commentary<|message|>I ask.<|end|><|start|>assistant to=functions.g<|channel|>commentary"
     " json<|message|>{}<|call|>", [("reasoning", "hm"), ("content", "I ask."), ("call", "g{}")]),
    ("<|channel|>commentary to=functions.f <|constrain|>json<|message|><|call|>", [("call", "f{}")]),
    ("<|channel|>analysis to=functions.g code<|message|>{}<|end|>", [("call", "g{}")]),
    ("<|channel|>commentary to=g<|message|>{}<|call|>", [("call", "g{}")]),
    ("<|channel|>commentary to=functions.g<|message|>{} <|start|>assistant" + ANSWER,
     [("call", "g{}"), ("content", "fine")]),
    ("<|channel|>commentary to=functions.g<|message|>{}", [("call", "g{}")]),
    ("<|channel|>commentary to=functions.g<|message|>no<|call|>", [("content", "no")]),
    ('<|channel|>commentary to=functions.g<|message|>{"a": "\\ud800"}<|call|>', [("content", '{"a": "\\ud800"}')]),
    ("<|channel|>commentary to=functions.g<|message|>[1]<|call|>", [("content", "[1]")]),
    ("<|channel|>analysis to=python code<|message|>print()<|call|>", [("reasoning", "print()")]),
    ("<|channel|>commentary to=functions.<|message|>{}<|call|>", [("content", "{}")]),
    (f"{THOUGHT}<|channel|>analysis<|message|>so\n<|end|><|start|>assistant<|channel|>analysis<|message|>on<|end|>"
     f"<|start|>assistant{ANSWER}<|end|><|start|>assistant{ANSWER}",
     [("reasoning", "hm\nso\non"), ("content", "fine\nfine")]),
    ("<|channel|>unknown<|message|>a<|return|>", [("content", "a")]),
    ("Just text", [("content", "Just text")]),
    ("<|channel|>", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "parts"), CASES)
def test_reasoning_content_and_calls(text: str, parts: Read) -> None:
    assert parts_of(marked(text), []) == parts


@given(st.sampled_from(CASES), st.lists(st.integers(0, 200), max_size=60), st.integers(0, 200), st.booleans())
def test_the_result_does_not_depend_on_the_split(
    case: tuple[str, Read], cuts: list[int], length: int, keep: bool
) -> None:
    """Also if the text is cut anywhere."""
    text = marked(case[0])[:length]
    assert parts_of(text, cuts, keep_cut_call=keep) == parts_of(text, [], keep_cut_call=keep)


def test_without_tools_a_call_is_content() -> None:
    text = "<|channel|>commentary to=functions.g<|message|>{}<|call|>"
    assert parts_of(marked(text), [], None) == [("content", "{}")]


def test_a_call_that_is_cut() -> None:
    text = marked('<|channel|>commentary to=functions.f<|message|>{"a": ')
    assert parts_of(text, []) == [("content", '{"a": ')]
    assert parts_of(text, [], keep_cut_call=True) == [("call", 'f{"a": ')]
    assert parts_of(text, [], drops_cut_call=True) == []


def test_text_is_returned_immediately() -> None:
    parser = HarmonyParser(PROMPT)
    parser.push(marked(THOUGHT + ANSWER))
    assert parser.push(" <|en") == [OutputText("content", " <|en")]
    assert parser.reasoning_ranges == [(0, len(marked(THOUGHT)) - len(PROMPT))]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOKENIZER = byte_level_tokenizer(SPECIAL)
MARKERS = {TOKENIZER.get_vocab()[name]: character for name, character in MARKER_TOKENS.items()}
ENDS = [TOKENIZER.get_vocab()[name] for name in (EOS, "<|call|>", SPECIAL[0])]


def accepts(grammar: str, text: str) -> bool:
    """Whether the grammar accepts a text, and an end-of-text token after it."""
    matcher = LLMatcher(LLTokenizer(TOKENIZER.to_str(), eos_token=ENDS), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENIZER.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


FORMATS = [
    ("json_schema", json.dumps(SCHEMA), '{"a": 1}', "{}"),
    ("regex", "a+/b", "aa/b", "b"),
    ("choice", '["yes", "no"]', "no", "maybe"),
    ("grammar", 'start: "x" y\ny: "z"', "xz", "x"),
    ("grammar", 'root ::= "x" "y"', "xy", "x"),
    ("lark", 'start: "call"', "call", "c"),
]


@pytest.mark.parametrize(("kind", "constraint", "valid", "invalid"), FORMATS)
def test_a_constraint_applies_to_the_channel_final(kind: str, constraint: str, valid: str, invalid: str) -> None:
    lark = harmony_grammar(MARKERS, "header", {}, True)
    grammar = build_grammar("nested", json.dumps({"lark": lark, "kind": kind, "text": constraint}))
    for before in ("", THOUGHT, THOUGHT.replace("hm", "<b>\n中 {")):
        assert accepts(grammar, f"{before}<|channel|>final<|message|>{valid}")
        assert accepts(grammar, f"{before}<|channel|>final <|constrain|>json<|message|>{valid}")
        assert not accepts(grammar, f"{before}<|channel|>final<|message|>{invalid}")
        assert not accepts(grammar, f"{before}<|channel|>commentary<|message|>{valid}")
    assert not accepts(grammar, valid) and not accepts(grammar, THOUGHT)


@pytest.mark.parametrize("state", ["header", "between"])
def test_the_grammar_of_calls(state: Any) -> None:
    begin = "" if state == "header" else "<|start|>assistant"
    tools = {"f": SCHEMA, "g": {}}
    forced = build_grammar("lark", harmony_grammar(MARKERS, state, tools, False))
    lark = harmony_grammar(MARKERS, state, tools, True)
    chosen = build_grammar("nested", json.dumps({"lark": lark, "kind": "json_schema", "text": json.dumps(SCHEMA)}))
    for grammar in (forced, chosen):
        for text, expected in (
            ('<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}', True),
            ('<|channel|>commentary to=functions.f json<|message|>{"a": 1}', True),
            ('<|channel|>commentary to=functions.f<|message|>{"a": 1}', True),
            (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', True),
            ('<|channel|>commentary to=functions.g <|constrain|>json<|message|>{"b": []}', True),
            ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}", False),
            ("<|channel|>commentary to=functions.h <|constrain|>json<|message|>{}", False),
            ('<|channel|>final<|message|>{"a": 1}', grammar is chosen),
        ):
            for before in ("", THOUGHT):
                assert accepts(grammar, begin + before + text) is expected, text


def test_an_invalid_constraint_is_reported() -> None:
    lark = harmony_grammar(MARKERS, "header", {}, True)
    with pytest.raises(ValueError, match="type"):
        build_grammar("nested", json.dumps({"lark": lark, "kind": "json_schema", "text": '{"type": 7}'}))


def call(name: str, call_id: str | None = None) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": {}}} | ({} if call_id is None else {"id": call_id})


def test_reasoning_for_the_template() -> None:
    (message,) = harmony_messages([{"role": "assistant", "content": "a", "reasoning_content": "b"}])
    assert message == {"role": "assistant", "content": "a", "thinking": "b"}
    both = {"role": "assistant", "content": "I ask.", "reasoning_content": "hm", "tool_calls": [call("f")]}
    (message,) = harmony_messages([both])
    assert (message["thinking"], message["content"]) == ("hm\nI ask.", "")
    user = {"role": "user", "content": "a", "reasoning_content": "b"}
    assert harmony_messages([user]) == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("ids", [("1", "2"), (None, None)])
def test_parallel_calls_for_the_template(ids: tuple[str | None, str | None]) -> None:
    """The template renders the first call of a message only."""
    calls = [call("f", ids[0]), call("g", ids[1])]
    results: list[dict[str, Any]] = [
        {"role": "tool", "content": name, "tool_call_id": id} for name, id in zip("fg", ids)
    ]
    if ids[0] is not None:
        results.reverse()
    first = {"role": "assistant", "content": "a", "tool_calls": calls}
    messages = harmony_messages([first, *results, {"role": "user", "content": "b"}])
    assert [message["role"] for message in messages] == ["assistant", "tool", "assistant", "tool", "user"]
    names = [message["tool_calls"][0]["function"]["name"] for message in messages if "tool_calls" in message]
    assert names == ["f", "g"] == [message["content"] for message in messages if message["role"] == "tool"]
    assert all(len(message.get("tool_calls", [0])) == 1 for message in messages) and messages[2]["content"] == ""


def test_tools_for_the_template() -> None:
    assert harmony_tools([{"type": "function", "function": {"name": "f"}}])[0]["function"]["description"] == ""
    described = [{"type": "function", "function": {"name": "f", "description": "d"}}]
    assert harmony_tools(described) == described
