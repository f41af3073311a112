"""llguidance grammars from request constraints."""

import json

import pytest

from swiftspec.text.output_grammar import build_grammar
from tests.support.grammars import accepts


def test_white_space_in_json_is_bounded() -> None:
    """Indented JSON is accepted; an endless run of blanks or lines is not."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
    value = {"a": [1, 2]}
    grammar = build_grammar("json_schema", json.dumps(schema))
    for text in (json.dumps(value), json.dumps(value, indent=4), json.dumps(value, separators=(",", ":"))):
        assert accepts(grammar, text), text
    for blanks in ("  ", "\n" * 3, "\n" + " " * 33, "\t"):
        assert not accepts(grammar, '{"a":' + blanks + "[]}"), repr(blanks)


def test_a_schema_can_set_its_white_space() -> None:
    for options, compact, spaced in (
        ({"whitespace_flexible": False}, True, False),
        ({"whitespace_pattern": " +"}, True, True),
        ({"item_separator": ","}, True, False),
    ):
        grammar = build_grammar("json_schema", json.dumps({"type": "array", "x-guidance": options}))
        assert (accepts(grammar, "[1,2]"), accepts(grammar, "[1,   2]")) == (compact, spaced), options
    assert accepts(build_grammar("json_schema", "true"), "1")


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
