"""Grammar of tool calls in any `ToolCallFormat`, for outputs that must call a tool or follow a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from swiftspec.sampling.grammar_process import ANY_OBJECT, bound_whitespace
from swiftspec.serve.format.call_reader import schema_types
from swiftspec.serve.format.tool_format import COUNT, ID, ParameterFormat, ToolCallFormat

DEFINITIONS = ("$defs", "definitions")
ID_PATTERNS = {ID: "/[a-zA-Z0-9]{9}/", COUNT: "/[0-9]{1,3}/"}
KEY_PATTERN = "/[a-zA-Z_][a-zA-Z0-9_-]{0,63}/"
JSON_TYPES = ("string", "integer", "number", "boolean", "object", "array")


def tool_call_grammar(
    format: ToolCallFormat,
    tools: Mapping[str, dict[str, Any]],
    special: Mapping[str, int],
    answer_schema: dict[str, Any] | None = None,
    single: bool = True,
) -> str:
    """Returns a Lark grammar for llguidance that accepts calls of tools, with arguments that match their schemas. Of an
    argument that is written without quotes as a text, only an enumeration is enforced.

    `tools`: JSON schema of the arguments by name of the tool.
    `special`: ids of the special tokens by text, which the text of a grammar does not match.
    `answer_schema`: JSON schema of an answer that is accepted instead of calls; None: only calls are accepted.
    `single`: whether exactly one call is accepted; always so with an `answer_schema` if calls have no marker.
    """
    if answer_schema is not None and not format.opening:
        return f"start: {_json_rule(_answer_or_call(format, tools, answer_schema))}"
    return _CallGrammar(format, special).build(tools, answer_schema, single=single)


class _CallGrammar:
    """Rules of one grammar."""

    def __init__(self, format: ToolCallFormat, special: Mapping[str, int]) -> None:
        self._format = format
        words = sorted((word for word in special if word), key=len, reverse=True)
        used = [re.escape(word) for word in words if any(word in literal for literal in format.literals)]
        self._special = special
        self._splitter = re.compile(f"({'|'.join([*used, ID, COUNT])})")
        self._rules: list[str] = []

    def build(self, tools: Mapping[str, Any], answer_schema: dict[str, Any] | None, *, single: bool) -> str:
        format = self._format
        begin, end = (format.begin + "[" * format.is_list), ("]" * format.is_list + format.end)
        separator = self._literal(format.separator or ("; " if not format.opening else ""))
        more = "" if single else f"({separator} block)*"
        calls = self._joined(self._literal(begin), "block", more, self._literal(end.rstrip()))
        names = " | ".join(f"call_{index}" for index in range(len(tools)))
        answer = [f"answer: {_json_rule(answer_schema)}"] if answer_schema is not None else []
        start = f"start: calls | answer\ncalls: {calls}" if answer else f"start: {calls}"
        for index, (name, schema) in enumerate(tools.items()):
            self._add_call(index, name, schema or ANY_OBJECT)
        return "\n".join([start, f"block: {names}", *self._rules, *answer])

    def _add_call(self, index: int, name: str, schema: dict[str, Any]) -> None:
        """Adds the rules of a tool: one rule per schema, since a schema can refer to its root."""
        format = self._format
        call_begin, call_end = self._literal(format.call_begin), self._literal(format.call_end)
        values = f"values_{index}"
        if format.style == "json":
            key = (
                f"{{{json.dumps(name)}: "
                if not format.name_key
                else (f"{{{json.dumps(format.name_key)}: {json.dumps(name)}, {json.dumps(format.arguments_key)}: ")
            )
            parts = (call_begin, json.dumps(key), values, '"}"', call_end)
        else:
            parts = (call_begin, json.dumps(name), self._literal(format.name_end), values, call_end)
        self._rules.append(f"call_{index}: {self._joined(*parts)}")
        if format.parameters is None:
            self._rules.append(f"{values}: {_json_rule(schema)}")
        else:
            self._add_parameters(values, schema, format.parameters)

    def _add_parameters(self, values: str, schema: dict[str, Any], parameters: ParameterFormat) -> None:
        """Adds the rules of arguments that are written one by one, in the order of the schema."""
        separator = self._literal(parameters.separator)
        properties = schema.get("properties")
        if not isinstance(properties, dict) or not properties:
            one = self._parameter(f"{values}_any", KEY_PATTERN, {"type": "string"}, schema)
            self._rules.append(f"{values}: ({one} ({self._joined(separator, one)})*)?")
            return
        required = schema.get("required") or ()
        last = len(properties) - 1
        for number, (name, own) in enumerate(properties.items()):
            one = self._parameter(f"{values}_p{number}", json.dumps(name), own, schema)
            first, later = f"{values}_first{number}", f"{values}_later{number}"
            next_first, next_later = (
                (f"{values}_first{number + 1}", f"{values}_later{number + 1}") if number < last else ("", "")
            )
            is_optional = name not in required
            for rule, before, skipped in ((first, "", next_first), (later, separator, next_later)):
                taken = self._joined(before, one, next_later)
                options = [taken] + ([skipped or '""'] if is_optional else [])
                self._rules.append(f"{rule}: {' | '.join(options)}")
        self._rules.append(f"{values}: {values}_first0")

    def _parameter(self, rule: str, name: str, schema: Any, root: dict[str, Any]) -> str:
        """Adds the rule of one argument and returns its name."""
        parameters = self._format.parameters
        assert parameters is not None
        schema = _resolved(schema, root)
        types = schema_types(schema)
        kind = next((each for each in JSON_TYPES if each in types), "string")
        before, after = parameters.value_begins[kind], parameters.value_end
        if parameters.quote:
            before = before.removesuffix(parameters.quote) if kind == "string" else before
            value = self._quoted_value(rule, kind, schema, root)
        elif kind == "string":
            value, after = self._raw_text(rule, schema, after), ""
        else:
            value = f"{rule}_value"
            self._rules.append(f"{value}: {_json_rule(_with_definitions(schema, root))}")
        self._rules.append(
            f"{rule}: "
            + self._joined(self._literal(parameters.begin), name, self._literal(before), value, self._literal(after))
        )
        return rule

    def _raw_text(self, rule: str, schema: Any, end: str) -> str:
        """Returns the expression of a text up to and including `end`."""
        texts = _enumerated(schema)
        literal = self._literal(end)
        if texts:
            return self._joined(f"({' | '.join(map(json.dumps, texts))})", literal)
        name = f"{rule}_text"
        if literal.startswith("<["):
            self._rules.append(f"{name}: /(?s:.*)/ {literal}")
        else:
            self._rules.append(f"{name}[suffix={json.dumps(end)}]: /(?s:.*)/")
        return name

    def _quoted_value(self, rule: str, kind: str, schema: Any, root: dict[str, Any]) -> str:
        """Returns the expression of a value in a format that quotes strings: JSON, unless the quotes are others."""
        parameters = self._format.parameters
        assert parameters is not None
        if len(parameters.quote) == 1 or kind in ("integer", "number", "boolean"):
            self._rules.append(f"{rule}_value: {_json_rule(_with_definitions(schema, root))}")
            return f"{rule}_value"
        if not any(each.startswith("any_value:") for each in self._rules):
            quote = self._literal(parameters.quote)
            self._rules += [
                "any_value: any_string | any_scalar | any_object | any_list",
                f"any_string: {quote} {self._raw_text('any', {}, parameters.quote)}",
                f"any_scalar: {_json_rule({'type': ['number', 'boolean', 'null']})}",
                f'any_object: "{{" ({KEY_PATTERN} ":" any_value ("," {KEY_PATTERN} ":" any_value)*)? "}}"',
                'any_list: "[" (any_value ("," any_value)*)? "]"',
            ]
        texts = _enumerated(schema)
        if kind == "string" and texts:
            quote = self._literal(parameters.quote)
            return f"{quote} ({' | '.join(map(json.dumps, texts))}) {quote}"
        return {"string": "any_string", "object": "any_object", "array": "any_list"}[kind]

    def _literal(self, text: str) -> str:
        """Returns the expression of a literal, with special tokens by id and patterns for placeholders."""
        parts: list[str] = []
        for part in filter(None, self._splitter.split(text)):
            token = self._special.get(part)
            parts.append(ID_PATTERNS.get(part) or (json.dumps(part) if token is None else f"<[{token}]>"))
        return " ".join(parts)

    @staticmethod
    def _joined(*parts: str) -> str:
        return " ".join(filter(None, parts)) or '""'


def _json_rule(schema: Any) -> str:
    return f"%json {json.dumps(bound_whitespace(schema))}"


def _enumerated(schema: Any) -> list[str]:
    """Returns the texts that a JSON schema lists; [] if it lists none."""
    if not isinstance(schema, dict):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum") or []
    return [value for value in values if isinstance(value, str)]


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Returns what a reference to a definition of the root stands for; other schemas as they are."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    found: Any = root
    for key in reference[2:].split("/"):
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return schema if found is None else found


def _with_definitions(schema: Any, root: Mapping[str, Any]) -> Any:
    """Returns the schema of a property with the definitions and options of the root, to which it may refer."""
    if not isinstance(schema, dict):
        return schema
    return {**{key: root[key] for key in (*DEFINITIONS, "x-guidance") if key in root}, **schema}


def _answer_or_call(
    format: ToolCallFormat, tools: Mapping[str, dict[str, Any]], answer_schema: dict[str, Any]
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
