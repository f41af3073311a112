"""Grammars of llguidance from what clients send."""

import json

import pytest

from swiftspec.serve.http.grammar import grammar_of


def test_each_kind() -> None:
    assert json.loads(grammar_of("json_schema", '{"type": "object"}'))["grammars"]
    assert "start: /a+/" in grammar_of("regex", "a+")
    assert 'start: "a"' in grammar_of("grammar", 'root ::= "a"')
    assert grammar_of("choice", '["a", "b"]') == 'start: "a" | "b"'


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("json_schema", '{"type": "objct"}', "Invalid type: objct"),
        ("json_schema", "{", None),
        ("regex", "(a", "unclosed group"),
        ("grammar", "start: nothing", "nothing"),
        ("grammar", "(" * 70_000, None),
        ("choice", "[", None),
        ("sql", "", "no such kind"),
    ],
)
def test_what_is_no_grammar_is_one_line(kind: str, text: str, why: str | None) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        grammar_of(kind, text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 300
