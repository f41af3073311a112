"""Conversion of output constraints to llguidance grammars.

The conversion is unbounded in time and memory, so `grammar_compiler` runs this file as a separate process that it can
kill. The file imports nothing from swiftspec, so that this process loads only llguidance.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from llguidance import LLMatcher, grammar_from

# "grammar": Lark, or the GBNF of llama.cpp. "nested": JSON of a Lark grammar (`lark`) and the `kind` and `text` of the
# constraint to which its rule `@answer` refers.
KINDS = ("json_schema", "regex", "grammar", "choice", "lark", "nested")
ANY_OBJECT = {"type": "object"}  # JSON schema of `response_format: json_object`
# White space between the tokens of JSON: enough for indented JSON, and not endless as llguidance's default, which lets
# a model fill the answer with blanks.
WHITESPACE_PATTERN = r" |(\r?\n){1,2}[ \t]{0,32}"
MAX_ERROR_CHARS = 300


def bound_whitespace(schema: Any) -> Any:
    """Returns a JSON schema with llguidance's option that bounds the white space between tokens, unless the schema has
    an option for white space. Values other than objects are returned unchanged."""
    if not isinstance(schema, dict):
        return schema
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict) or options.keys() & {"whitespace_pattern", "whitespace_flexible"}:
        return schema
    return {**schema, "x-guidance": {**options, "whitespace_pattern": WHITESPACE_PATTERN}}


def lenient(schema: Any) -> Any:
    """Returns a JSON schema whose keywords and formats that llguidance does not know are ignored instead of refused,
    unless the schema has options of its own. Values other than objects are returned unchanged."""
    if not isinstance(schema, dict) or not schema or "x-guidance" in schema:
        return schema
    return {**schema, "x-guidance": {"lenient": True}}


def build_grammar(kind: str, text: str) -> str:
    """Converts an output constraint to a grammar for llguidance's `LLMatcher`. Raises ValueError with a one-line
    message if the constraint is invalid.

    `kind`: one of KINDS.
    `text`: the constraint: a JSON schema, regular expression or grammar; for "choice" a JSON list of strings.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of grammar: {kind}")
    try:
        grammar = _convert(kind, text)
        error_text = LLMatcher.validate_grammar(grammar)
    except Exception as error:  # the converters raise arbitrary exceptions on invalid input
        error_text = str(error) or type(error).__name__
    else:
        if not error_text:
            return grammar
    error_line = " ".join(error_text.split())
    raise ValueError(error_line if len(error_line) <= MAX_ERROR_CHARS else error_line[: MAX_ERROR_CHARS - 3] + "...")


def _convert(kind: str, text: str) -> str:
    if kind == "nested":
        fields = json.loads(text)
        answer = _convert(fields["kind"], fields["text"])
        inner = json.loads(answer)["grammars"] if answer.lstrip().startswith("{") else [{"lark_grammar": answer}]
        outer: list[dict[str, Any]] = [{"lark_grammar": fields["lark"]}]
        return json.dumps({"grammars": [*outer, {**inner[0], "name": "answer"}, *inner[1:]]})
    if kind == "json_schema":
        text = json.dumps(bound_whitespace(json.loads(text)))
    return str(grammar_from(kind, text))  # pyright: ignore[reportArgumentType]


def main() -> None:
    """Reads a JSON object with `kind` and `text` from standard input and writes one with `grammar` or `error`.

    Command-line arguments: limits on CPU time in seconds and on address space in bytes.
    """
    seconds, memory = map(int, sys.argv[1:3])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    request = json.load(sys.stdin)
    try:
        reply = {"grammar": build_grammar(request["kind"], request["text"])}
    except ValueError as error:
        reply = {"error": str(error)}
    json.dump(reply, sys.stdout)


if __name__ == "__main__":
    main()
