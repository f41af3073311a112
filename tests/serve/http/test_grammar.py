"""llguidance grammars from request constraints."""

import json

import pytest

from swiftspec.serve.http.grammar import build_grammar


def test_each_kind() -> None:
    assert json.loads(build_grammar("json_schema", '{"type": "object"}'))["grammars"]
    assert "start: /a+/" in build_grammar("regex", "a+")
    assert 'start: "a"' in build_grammar("grammar", 'root ::= "a"')
    assert build_grammar("choice", '["a", "b"]') == 'start: "a" | "b"'


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("json_schema", '{"type": "objct"}', "Invalid type: objct"),
        ("json_schema", "{", None),
        ("regex", "(a", "unclosed group"),
        ("grammar", "start: nothing", "nothing"),
        ("grammar", "(" * 70_000, None),
        ("choice", "[", None),
        ("sql", "", "unknown kind"),
    ],
)
def test_an_invalid_grammar_is_one_line(kind: str, text: str, why: str | None) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        build_grammar(kind, text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 300
