"""Conversion of output constraints to llguidance grammars.

It is unbounded in time and memory, so `grammar_compiler` runs this file in a process of its own, which it can kill.
Therefore this file imports nothing from the package.
"""

from __future__ import annotations

import json
import resource
import sys

from llguidance import LLMatcher, grammar_from

KINDS = ("json_schema", "regex", "grammar", "choice", "lark")  # "grammar": Lark, or the GBNF of llama.cpp
ANY_OBJECT = '{"type":"object"}'  # the schema that `response_format: json_object` means
MAX_ERROR_CHARS = 300


def build_grammar(kind: str, text: str) -> str:
    """The grammar for one of KINDS, as text for `LLMatcher`. The text of "choice" is a JSON list of strings. Raises
    ValueError, with a message of one line, on an invalid grammar."""
    if kind not in KINDS:
        raise ValueError(f"no such kind of grammar: {kind}")
    try:
        grammar = str(grammar_from(kind, text))  # pyright: ignore[reportArgumentType]
        error_text = LLMatcher.validate_grammar(grammar)
    except Exception as error:  # the converters raise arbitrary exceptions on invalid input
        error_text = str(error) or type(error).__name__
    else:
        if not error_text:
            return grammar
    error_line = " ".join(error_text.split())
    raise ValueError(error_line if len(error_line) <= MAX_ERROR_CHARS else error_line[: MAX_ERROR_CHARS - 3] + "...")


def main() -> None:
    """Compiles the grammar on standard input, a JSON object with `kind` and `text`, within the limits in argv: CPU
    seconds
    and bytes of address space."""
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
