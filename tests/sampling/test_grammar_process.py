"""llguidance grammars from request constraints."""

import asyncio
import json
from collections.abc import Callable

import pytest

from swiftspec.sampling.grammar import check_untrusted_grammar
from swiftspec.sampling.grammar_process import build_grammar
from swiftspec.serve.grammar_compiler import SandboxedGrammarCompiler
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


def rules(links: int) -> str:
    chain = "\n".join(f"r{i}: r{i + 1}" for i in range(links))
    return f'start: r0\n{chain}\nr{links}: "x"'


def references(links: int) -> str:
    chain = {f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(links)}
    return json.dumps({"$ref": "#/$defs/a0", "$defs": {**chain, f"a{links}": {"type": "integer"}}})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "make", "deepest"), [("grammar", rules, 2600), ("json_schema", references, 900)], ids=["rules", "schema"]
)
def test_the_process_refuses_what_overflows_an_ordinary_stack(
    kind: str, make: Callable[[int], str], deepest: int
) -> None:
    """`deepest`: links that an 8 MiB stack still holds. The process has a quarter of it."""
    compile_ = SandboxedGrammarCompiler()
    assert asyncio.run(compile_(kind, make(20)))
    for links in (deepest // 2, deepest, 3 * deepest):
        with pytest.raises(ValueError, match="limits on time, memory and nesting"):
            asyncio.run(compile_(kind, make(links)))
    grammar = build_grammar(kind, make(20))
    check_untrusted_grammar(grammar)
    with pytest.raises(ValueError, match="nesting"):
        check_untrusted_grammar(rules(4 * deepest))
