"""Conversion of output constraints to llguidance grammars, and the process in which untrusted ones are converted.

The conversion is unbounded in time, memory and depth of recursion, so servers run this file as a process that they can
kill (`serve/grammar_compiler.py`, `sampling/grammar.py`). It imports nothing from swiftspec, so that this process
loads only llguidance.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from typing import Any

# "grammar": Lark, or the GBNF of llama.cpp. "nested": JSON of a Lark grammar (`lark`) and the `kind` and `text` of the
# constraint to which its rule `@answer` refers. "converted": a result of `build_grammar`, which is only validated.
KINDS = ("json_schema", "regex", "grammar", "choice", "lark", "nested", "converted")
ANY_OBJECT = {"type": "object"}  # JSON schema of `response_format: json_object`
# White space between the tokens of JSON: enough for indented JSON, and not endless as llguidance's default, which lets
# a model fill the answer with blanks.
WHITESPACE_PATTERN = r" |(\r?\n){1,2}[ \t]{0,32}"
LOOK_AROUND_PATTERN = re.compile(r'"pattern": "(?:[^"\\]|\\.)*?\(\?<?[=!](?:[^"\\]|\\.)*"')  # in JSON
MAX_ERROR_CHARS = 300
# llguidance recurses on the native stack: what compiles on this much of it is safe on the 8 MiB of the threads that
# compile the grammar again for their model.
STACK_BYTES = 2 << 20
MEMORY_BYTES = 4 << 30  # address space
CPU_SECONDS = 5
TIMEOUT_S = 60.0  # after which the parent process kills this one, which waits for a CPU on a busy machine
TIMEOUT_MESSAGE = f"compilation took longer than {TIMEOUT_S:g} s: simplify it"
COMMAND = (sys.executable, "-P", __file__)


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
    and with them patterns with look-around, such as pydantic's of a Decimal. A schema with options of its own, and
    values other than objects, are returned unchanged."""
    if not isinstance(schema, dict) or not schema or "x-guidance" in schema:
        return schema
    text = json.dumps(schema)  # searched as text: servers do this between requests, and a schema can have megabytes
    if "(?" in text:
        schema = json.loads(LOOK_AROUND_PATTERN.sub('"x-ignored-pattern": true', text))
    return {**schema, "x-guidance": {"lenient": True}}


def build_grammar(kind: str, text: str) -> str:
    """Converts an output constraint to a grammar for llguidance's `LLMatcher`. Raises ValueError with a one-line
    message if the constraint is invalid.

    `kind`: one of KINDS.
    `text`: the constraint: a JSON schema, regular expression or grammar; for "choice" a JSON list of strings.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of grammar: {kind}")
    from llguidance import LLMatcher

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
    from llguidance import grammar_from

    if kind == "nested":
        fields = json.loads(text)
        answer = _convert(fields["kind"], fields["text"])
        inner = json.loads(answer)["grammars"] if answer.lstrip().startswith("{") else [{"lark_grammar": answer}]
        outer: list[dict[str, Any]] = [{"lark_grammar": fields["lark"]}]
        return json.dumps({"grammars": [*outer, {**inner[0], "name": "answer"}, *inner[1:]]})
    if kind == "converted":
        return text
    if kind == "json_schema":
        text = json.dumps(bound_whitespace(json.loads(text)))
    return str(grammar_from(kind, text))  # pyright: ignore[reportArgumentType]


def encode_request(kind: str, text: str) -> bytes:
    """Returns the input of the process for one constraint; see `build_grammar`."""
    return json.dumps({"kind": kind, "text": text}).encode()


def decode_reply(output: bytes) -> str:
    """Returns the grammar in the output of the process. Raises ValueError with a one-line message if the constraint is
    invalid, or if the process has exceeded its limits."""
    try:
        reply: dict[str, str] = json.loads(output)
    except ValueError:
        raise ValueError("compilation exceeded the limits on time, memory and nesting: simplify it") from None
    if "error" in reply:
        raise ValueError(reply["error"])
    return reply["grammar"]


def main() -> None:
    """Reads a JSON object with `kind` and `text` from standard input and writes one with `grammar` or `error`."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    request = json.load(sys.stdin)
    try:
        reply = {"grammar": build_grammar(request["kind"], request["text"])}
    except ValueError as error:
        reply = {"error": str(error)}
    json.dump(reply, sys.stdout)


if __name__ == "__main__":
    main()
