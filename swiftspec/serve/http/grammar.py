"""What an answer must keep to, as a grammar of llguidance. Building one has no bound in time and memory: compiler.py
runs this file as a process of its own, which can be ended. So it imports nothing of the package."""

from __future__ import annotations

import json
import resource
import sys

from llguidance import LLMatcher, grammar_from

KINDS = ("json_schema", "regex", "grammar", "choice", "lark")  # "grammar": Lark, or the GBNF of llama.cpp
ANY_OBJECT = '{"type":"object"}'  # the schema that `response_format: json_object` means
LONGEST = 300  # characters of a complaint


def grammar_of(kind: str, text: str) -> str:
    """The grammar for one of KINDS, as text that `LLMatcher` takes. "choice" takes a JSON list of texts. Raises
    ValueError, in one line, on what makes none."""
    if kind not in KINDS:
        raise ValueError(f"no such kind of grammar: {kind}")
    try:
        grammar = str(grammar_from(kind, text))  # pyright: ignore[reportArgumentType]
        complaint = LLMatcher.validate_grammar(grammar)
    except Exception as error:  # its converters raise anything on what they do not understand
        complaint = str(error) or type(error).__name__
    else:
        if not complaint:
            return grammar
    words = " ".join(complaint.split())
    raise ValueError(words if len(words) <= LONGEST else words[: LONGEST - 3] + "...")


def main() -> None:
    """Compiles what comes on standard input, a JSON object of kind and text, within so many CPU seconds and bytes."""
    seconds, memory = map(int, sys.argv[1:3])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    asked = json.load(sys.stdin)
    try:
        reply = {"grammar": grammar_of(asked["kind"], asked["text"])}
    except ValueError as error:
        reply = {"error": str(error)}
    json.dump(reply, sys.stdout)


if __name__ == "__main__":
    main()
